"""Attention to chosen blocks beside transformers (MiniMax-M3) or a naive model (MoBA, NSA), and the same choices and
tokens however a prompt is computed.

Contexts are longer than what is chosen of them.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.architecture.state import ChosenKVSpec, KVSpec
from tandem.cli.model_cost import named_model
from tandem.compute.attention import Backends
from tandem.compute.block_sparse import BlocksAsKV
from tandem.compute.native.attention import NativeBackend
from tandem.compute.torch.kernels import TorchKernels
from tandem.models.loader import load_model
from tests.golden.test_parity import (
    check_2000_tokens,
    check_every_cut,
    chosen_after,
    random_prompt,
    reference_logits,
)
from tests.golden.test_sparse import (
    GREEDY,
    KERNELS,
    NATIVE,
    check_that_no_bit_depends_on_what_shares_a_step,
    prompt_of,
    tokens_alone_and_shared,
)
from tests.helpers.checkpoints import load_reference
from tests.helpers.choices import recorded_blocks
from tests.helpers.engines import drain, serve_alone, tiny_engine
from tests.helpers.handoff import Side, hand_off
from tests.helpers.native_kernels import load_or_skip
from tests.helpers.sparse_checkpoints import BLOCK_BUILDERS, NaiveModel, save_published_minimax_m3, save_tiny_minimax_m3
from tests.helpers.stepping import REFERENCE, Stepper
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer

FAMILIES = BLOCK_BUILDERS
NUM_CHOOSING = {"minimax_m3": 2, "moba": 3, "nsa": 3}
CPU = torch.device("cpu")


@pytest.fixture(params=[pytest.param("torch", marks=pytest.mark.slow), "native"])
def kernels(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "native":
        load_or_skip()
    return KERNELS[request.param]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def expected_logits(path: Path, family: str, prompt: list[int]) -> torch.Tensor:
    if family == "minimax_m3":
        return reference_logits(load_reference(path), prompt)
    return NaiveModel(path).logits(prompt)


def steppers(path: Path, options: dict[str, Any], num_tokens: int) -> Callable[[], Stepper]:
    """Each with nothing computed yet, of one model."""
    is_native = options is NATIVE
    native: Backends = {KVSpec: NativeBackend(CPU), ChosenKVSpec: BlocksAsKV(NativeBackend(CPU))} if is_native else {}
    kernels = load_or_skip() if is_native else TorchKernels()
    decoder = load_model(str(path), device=CPU, kernels=kernels).decoder
    return lambda: Stepper(decoder, {**REFERENCE, **native}, num_tokens=num_tokens)


def test_a_prompt_cut_at_every_position(family: str, kernels: dict[str, Any], tmp_path: Path) -> None:
    path, prompt = FAMILIES[family](tmp_path), random_prompt(43)
    expected = expected_logits(path, family, prompt)
    check_every_cut(steppers(path, kernels, len(prompt)), prompt, expected)


def test_the_published_form_of_minimax_m3_is_the_same_model(tmp_path: Path) -> None:
    prompt = random_prompt(43)
    paths = save_tiny_minimax_m3(tmp_path / "text"), save_published_minimax_m3(tmp_path / "published")
    text, published = (steppers(path, KERNELS["torch"], 43)().step(prompt) for path in paths)
    assert torch.equal(text, published)


def test_the_blocks_chosen_are_those_of_the_definition(
    kernels: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of MoBA and NSA; MiniMax-M3's are below."""
    for name in ("moba", "nsa"):
        path, prompt = FAMILIES[name](tmp_path / name), random_prompt(60)
        naive = NaiveModel(path)
        naive.logits(prompt)
        with recorded_blocks(monkeypatch) as ours:
            steppers(path, kernels, len(prompt))().step(prompt)
        assert ours.by_query == {
            (f"model.layers.{layer}.self_attn.q_proj", position): frozenset(
                (number, block) for number, blocks in enumerate(sets) for block in blocks
            )
            for layer, by_position in enumerate(naive.chosen)
            for position, sets in enumerate(by_position)
        }


def test_the_blocks_chosen_are_those_that_transformers_chooses(
    kernels: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, prompt = save_tiny_minimax_m3(tmp_path), random_prompt(60)
    reference, theirs = load_reference(path), dict[str, torch.Tensor]()
    for name, module in reference.named_modules():
        if name.endswith("indexer"):
            module.register_forward_hook(lambda _module, _inputs, output, name=name: theirs.update({name: output[0]}))
    reference_logits(reference, prompt)
    with recorded_blocks(monkeypatch) as ours:
        steppers(path, kernels, len(prompt))().step(prompt)
    assert len(theirs) == 2
    assert ours.by_query == {
        (name.replace("indexer", "q_proj"), position): frozenset(
            (head, int(block)) for head in range(2) for block in chosen[head, position] if block >= 0
        )
        for name, chosen in theirs.items()
        for position in range(60)
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", KERNELS)
def test_errors_do_not_grow_over_2000_tokens(kind: str, tmp_path: Path) -> None:
    """Of MiniMax-M3; the naive models would take an hour. Blocks are few enough that none is chosen by rounding."""
    path = save_tiny_minimax_m3(tmp_path, max_position_embeddings=4096, index_block_size=32, index_topk_blocks=8)
    check_2000_tokens(path, steppers(path, KERNELS[kind], 2000))


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes: dict[str, Any] = {"vocab_size": NUM_TOKENS, "eos_token_id": NUM_TOKENS - 1}
    return write_byte_tokenizer(FAMILIES[request.param](tmp_path_factory.mktemp(request.param), **sizes))


def test_choices_are_the_same_in_prefill_decode_and_after_a_failover(
    checkpoint: Path, kernels: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `test_sparse`: token by token; handed over and gone on with; and all of it as a prompt, in chunks."""
    steps = {"max_num_batched_tokens": 16, "max_num_running": 16, "block_size": 8, **kernels}
    prompt = prompt_of(61, 1)
    with recorded_blocks(monkeypatch) as record:
        answer = serve_alone(checkpoint, {"r": prompt}, {"r": GREEDY}, **kernels)["r"]
        assert hand_off(Side(checkpoint, **steps), Side(checkpoint, **steps), prompt, GREEDY) == answer
        scored = replace(GREEDY, max_tokens=1, prompt_logprobs=0)
        assert serve_alone(checkpoint, {"r": prompt + answer[:-1]}, {"r": scored}, **steps)["r"] == answer[-1:]
    layers = {layer for layer, _ in record.by_query}
    assert len(layers) == next(number for name, number in NUM_CHOOSING.items() if checkpoint.name.startswith(name))
    everywhere = {(layer, position) for layer in layers for position in range(len(prompt + answer) - 1)}
    assert record.by_query.keys() == everywhere
    assert record.num_computed > 2.2 * len(everywhere)  # NOTE: the last layer computes of a prompt what is asked


def test_shared_preempted_and_cached_requests_get_the_tokens_they_get_alone(
    checkpoint: Path, kernels: dict[str, Any]
) -> None:
    answers = tokens_alone_and_shared(checkpoint, kernels)
    if checkpoint.name.startswith("minimax_m3"):
        reference = load_reference(checkpoint)
        assert answers == {prompt: chosen_after(reference, list(prompt), found) for prompt, found in answers.items()}


def test_in_bfloat16_no_token_depends_on_cuts_or_on_what_shares_a_step(checkpoint: Path) -> None:
    check_that_no_bit_depends_on_what_shares_a_step(checkpoint)


def test_the_engine_reads_what_the_plan_says(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what was really chosen: K and V of 2 heads of 16 numbers, in float32."""
    prompt, params = prompt_of(150, 3), replace(GREEDY, max_tokens=50)
    engine = tiny_engine(checkpoint, **KERNELS["torch"])
    with recorded_blocks(monkeypatch) as record:
        engine.add_request(prompt, params)
        drain(engine)
    config = NaiveModel(checkpoint).config
    size = next(config[name] for name in ("index_block_size", "moba_chunk_size", "nsa_block_size") if name in config)
    rows = 0.0
    for (_, position), pairs in record.by_query.items():
        if position >= len(prompt):
            num_sets = len({number for number, _ in pairs})
            rows += 2 / num_sets * sum(min(size, position + 1 - block * size) for _, block in pairs)
    beside: dict[str, Callable[[int], float]] = {
        "minimax_m3": lambda context: 64 * context + 2 * 16 * context,  # K and V of the first layer; index keys
        "moba": lambda context: 3 * 2 * 16 / 8 * context,  # means
        "nsa": lambda context: 3 * (64 / 4 * context + 64 * 10),  # compressed rows, and windows
    }
    others = beside[next(name for name in FAMILIES if checkpoint.name.startswith(name))]
    counted = 4 * (32 * rows + sum(others(position + 1) for position in range(len(prompt), len(prompt) + 49)))
    assert engine.counters.num_decode_steps == 49
    assert engine.counters.read_bytes == pytest.approx(counted, rel=0.001)
    cost = named_model(str(checkpoint), None, 32)
    planned = sum(cost.read_bytes(num_tokens) for num_tokens in range(151, 200))
    assert engine.counters.read_bytes == pytest.approx(planned, rel=0.02)
