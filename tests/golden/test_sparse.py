"""Attention to chosen tokens beside transformers, and the same choices and tokens however a prompt is computed.

Contexts are longer than what is chosen of them, nine tokens.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.architecture.state import IndexedLatentSpec
from tandem.cli.model_cost import named_model
from tandem.compute.attention import Backends
from tandem.compute.native.sparse import NativeIndexedBackend
from tandem.compute.torch.kernels import TorchKernels
from tandem.core.sampling_params import SamplingParams
from tandem.models.loader import load_model
from tests.golden.test_parity import (
    check_2000_tokens,
    check_every_cut,
    chosen_after,
    random_prompt,
    reference_logits,
)
from tests.helpers import checkpoints
from tests.helpers.choices import recorded
from tests.helpers.engines import drain, least_kv_cache_bytes, serve_alone, tiny_engine, token_ids
from tests.helpers.handoff import Side, hand_off
from tests.helpers.native_kernels import load_or_skip
from tests.helpers.stepping import REFERENCE, Stepper
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer

FAMILIES = {"deepseek_v32": checkpoints.save_tiny_deepseek_v32, "glm_moe_dsa": checkpoints.save_tiny_glm_moe_dsa}
NUM_CHOOSING = {"deepseek_v32": 3, "glm_moe_dsa": 2}
CPU = torch.device("cpu")
TOP_K = 9
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PYTHON: dict[str, Any] = {"dtype": "float32", "native_kernels": False, "attention_backend": "reference"}
NATIVE: dict[str, Any] = {"dtype": "float32", "native_kernels": True, "attention_backend": "native"}
KERNELS = {"torch": PYTHON, "native": NATIVE}


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "native":
        load_or_skip()
    return KERNELS[request.param]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def steppers(path: Path, options: dict[str, Any], num_tokens: int) -> Callable[[], Stepper]:
    """Each with nothing computed yet, of one model."""
    is_native = options is NATIVE
    kernels = load_or_skip() if is_native else TorchKernels()
    backends: Backends = {**REFERENCE, IndexedLatentSpec: NativeIndexedBackend(CPU)} if is_native else REFERENCE
    decoder = load_model(str(path), device=CPU, kernels=kernels).decoder
    return lambda: Stepper(decoder, backends, num_tokens=num_tokens)


def test_a_prompt_cut_at_every_position(family: str, kernels: dict[str, Any], tmp_path: Path) -> None:
    path, prompt = FAMILIES[family](tmp_path), random_prompt(30)
    expected = reference_logits(checkpoints.load_reference(path), prompt)
    check_every_cut(steppers(path, kernels, len(prompt)), prompt, expected)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(family, kind, marks=() if (family, kind) == ("glm_moe_dsa", "native") else pytest.mark.slow)
        for family in FAMILIES
        for kind in KERNELS
    ],
)
def test_errors_do_not_grow_over_2000_tokens(family: str, kind: str, tmp_path: Path) -> None:
    path = FAMILIES[family](tmp_path, max_position_embeddings=4096, index_topk=64)
    check_2000_tokens(path, steppers(path, KERNELS[kind], 2000))


def test_the_tokens_chosen_are_those_that_transformers_chooses(
    family: str, kernels: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, prompt = FAMILIES[family](tmp_path), random_prompt(60)
    reference, theirs = checkpoints.load_reference(path), dict[str, torch.Tensor]()

    def note(name: str, chosen: torch.Tensor) -> None:
        theirs[name] = chosen

    for name, module in reference.named_modules():
        if name.endswith("indexer"):
            module.register_forward_hook(lambda _module, _inputs, output, name=name: note(name, output[0]))
    reference_logits(reference, prompt)
    with recorded(monkeypatch) as ours:
        steppers(path, kernels, len(prompt))().step(prompt)
    assert len(theirs) == NUM_CHOOSING[family]
    assert ours.by_query == {
        (name, position): frozenset(int(each) for each in chosen[position] if each <= position)
        for name, chosen in theirs.items()
        for position in range(60)
    }


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes: dict[str, Any] = {"vocab_size": NUM_TOKENS, "eos_token_id": NUM_TOKENS - 1}
    return write_byte_tokenizer(FAMILIES[request.param](tmp_path_factory.mktemp(request.param), **sizes))


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(6, 199) for _ in range(length)]


def test_choices_are_the_same_in_prefill_decode_and_after_a_failover(
    checkpoint: Path, kernels: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer token by token; handed over and gone on with by another worker; and all of it as the prompt of a third,
    in chunks, as after a failover. `recorded` compares each query with the same query before.
    """
    steps = {"max_num_batched_tokens": 16, "max_num_running": 16, "block_size": 8, **kernels}
    prompt = prompt_of(61, 1)
    with recorded(monkeypatch) as record:
        answer = serve_alone(checkpoint, {"r": prompt}, {"r": GREEDY}, **kernels)["r"]
        before = dict(record.by_query)
        assert hand_off(Side(checkpoint, **steps), Side(checkpoint, **steps), prompt, GREEDY) == answer
        scored = replace(GREEDY, max_tokens=1, prompt_logprobs=0)
        assert serve_alone(checkpoint, {"r": prompt + answer[:-1]}, {"r": scored}, **steps)["r"] == answer[-1:]
    layers = {layer for layer, _ in before}
    assert len(layers) == next(number for family, number in NUM_CHOOSING.items() if checkpoint.name.startswith(family))
    everywhere = {(layer, position) for layer in layers for position in range(len(prompt + answer) - 1)}
    assert record.by_query.keys() == everywhere
    assert {len(found) for (_, position), found in before.items() if position >= TOP_K} == {TOP_K}
    assert record.num_computed > 2.5 * len(everywhere)


def tokens_alone_and_shared(checkpoint: Path, kernels: dict[str, Any]) -> dict[tuple[int, ...], list[int]]:
    """By prompt, the tokens of requests alone. They get the same in steps of eleven tokens, from a pool that holds one
    request of full length, and behind prefixes that are found.
    """
    shared = prompt_of(40, 2)
    prompts = {f"r{i}": shared[: 8 * i] + prompt_of(13 - i, 10 + i) for i in range(6)}
    params = dict.fromkeys(prompts, replace(GREEDY, max_tokens=40))
    expected = serve_alone(checkpoint, prompts, params, **kernels)
    cache_bytes = least_kv_cache_bytes(checkpoint, 96, 16, "float32")
    tight = {"max_model_len": 96, "max_num_batched_tokens": 11, "max_num_running": 6, "kv_cache_bytes": cache_bytes}
    for sizes in (tight, {"max_num_batched_tokens": 11, "max_num_running": 6, "block_size": 8}):
        engine = tiny_engine(checkpoint, **sizes, **kernels)
        for _ in range(2):
            for name, prompt in prompts.items():
                engine.add_request(prompt, params[name], request_id=name)
            outputs = drain(engine)
            assert {name: token_ids(outputs[name, 0]) for name in prompts} == expected
        assert engine.counters.num_preemptions >= 2 or sizes is not tight
    assert engine.counters.num_cached_prompt_tokens >= 150
    return {tuple(prompts[name]): tokens for name, tokens in expected.items()}


def check_that_no_bit_depends_on_what_shares_a_step(checkpoint: Path) -> None:
    """In bfloat16 on the compiled kernels, where near ties are common."""
    load_or_skip()
    prompts = {f"r{i}": prompt_of(length, i) for i, length in enumerate((90, 3, 41, 17, 60))}
    params = {name: SamplingParams(temperature=i % 2, seed=i, max_tokens=30) for i, name in enumerate(prompts)}
    native = NATIVE | {"dtype": "bfloat16"}
    expected = serve_alone(checkpoint, prompts, params, prefix_caching=False, max_num_batched_tokens=256, **native)
    engine = tiny_engine(checkpoint, max_num_batched_tokens=11, max_num_running=6, block_size=8, **native)
    for name, prompt in prompts.items():
        engine.add_request(prompt, params[name], request_id=name)
    outputs = drain(engine)
    assert {name: token_ids(outputs[name, 0]) for name in prompts} == expected


@pytest.mark.parametrize("kernels", [pytest.param("torch", marks=pytest.mark.slow), "native"], indirect=True)
def test_shared_preempted_and_cached_requests_get_the_tokens_they_get_alone(
    checkpoint: Path, kernels: dict[str, Any]
) -> None:
    reference = checkpoints.load_reference(checkpoint)
    for prompt, found in tokens_alone_and_shared(checkpoint, kernels).items():
        assert found == chosen_after(reference, list(prompt), found)


def test_on_the_compiled_kernels_no_bit_depends_on_cuts_or_on_what_shares_a_step(checkpoint: Path) -> None:
    check_that_no_bit_depends_on_what_shares_a_step(checkpoint)


def test_the_engine_reads_what_the_plan_says(
    checkpoint: Path, kernels: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside what was really chosen and scanned: rows of 48 numbers, index keys of 24, in float32."""
    prompt, params = prompt_of(150, 3), replace(GREEDY, max_tokens=50)
    engine = tiny_engine(checkpoint, **kernels)
    with recorded(monkeypatch) as record:
        engine.add_request(prompt, params)
        drain(engine)
    decoded = {key: found for key, found in record.by_query.items() if key[1] >= len(prompt)}
    num_choosing = len({layer for layer, _ in decoded})
    rows = sum(len(found) for found in decoded.values()) * 3 / num_choosing
    keys = sum(position + 1 for _, position in decoded)
    assert engine.counters.num_decode_steps == 49
    assert engine.counters.read_bytes == 4 * (48 * rows + 24 * keys)
    planned = 49 * named_model(str(checkpoint), None, 32).read_bytes(175)
    assert engine.counters.read_bytes == pytest.approx(planned, rel=0.02)
