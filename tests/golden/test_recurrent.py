"""Recurrent states: logits beside transformers, and the same tokens batched, cached, preempted and among aborts."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.architecture.state import KVSpec, LatentSpec, RecurrentSpec
from tandem.compute.attention import Backends
from tandem.compute.latents import LatentsAsKV
from tandem.compute.native.attention import NativeBackend
from tandem.compute.native.recurrent import NativeRecurrentBackend
from tandem.compute.ops import Kernels
from tandem.compute.torch.kernels import TorchKernels
from tandem.core.sampling_params import SamplingParams
from tandem.engine.engine import Engine
from tandem.models.loader import load_model
from tests.golden.test_parity import (
    RELATIVE_ERROR,
    check_2000_tokens,
    check_every_cut,
    random_prompt,
    reference_logits,
    relative_error,
)
from tests.helpers import checkpoints
from tests.helpers.engines import drain, least_kv_cache_bytes, serve_alone, tiny_engine, token_ids
from tests.helpers.hybrid_checkpoints import (
    RECURRENT_BUILDERS,
    save_tiny_falcon_h1,
    save_tiny_granite_hybrid,
    save_tiny_nemotron_latent,
)
from tests.helpers.native_kernels import load_or_skip
from tests.helpers.stepping import REFERENCE, Stepper
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer

CPU = torch.device("cpu")
FAMILIES = RECURRENT_BUILDERS
PYTHON = {"dtype": "float32", "native_kernels": False, "attention_backend": "reference"}
NORM_BEHIND_THE_GATE = {"mamba_rms_norm": True, "ssm_multipliers": [0.9, 0.7, 0.7, 0.7, 0.6]}
BIASES = {
    "mamba_rms_norm": True,
    "mamba_norm_before_gate": True,
    "mamba_d_ssm": None,
    "mamba_d_head": "auto",
    "mamba_n_heads": 8,
    "attention_in_multiplier": 1.0,
    "ssm_in_multiplier": 1.0,
} | dict.fromkeys(("mamba_proj_bias", "projectors_bias", "attention_bias", "mlp_bias"), True)


KERNELS = ["torch", "native"]


def begin(path: Path, computed_by: str, num_tokens: int) -> Callable[[], Stepper]:
    """Steppers of one model with nothing computed yet."""
    kernels: Kernels = TorchKernels()
    backends = REFERENCE
    if computed_by == "native":
        native: Backends = {
            KVSpec: NativeBackend(CPU),
            LatentSpec: LatentsAsKV(NativeBackend(CPU)),
            RecurrentSpec: NativeRecurrentBackend(CPU),
        }
        kernels, backends = load_or_skip(), {**REFERENCE, **native}
    decoder = load_model(str(path), device=CPU, kernels=kernels).decoder
    return lambda: Stepper(decoder, backends, num_tokens=num_tokens)


@pytest.mark.parametrize("computed_by", KERNELS)
@pytest.mark.parametrize("family", checkpoints.family_params(FAMILIES))
def test_a_prompt_cut_at_every_position(family: str, computed_by: str, tmp_path: Path) -> None:
    path, prompt = FAMILIES[family](tmp_path), random_prompt(30)
    expected = reference_logits(checkpoints.load_reference(path), prompt)
    check_every_cut(begin(path, computed_by, len(prompt)), prompt, expected)


@pytest.mark.parametrize("computed_by", KERNELS)
def test_without_experts_and_with_positions(computed_by: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_local_experts": 0, "position_embedding_type": "rope", "mamba_proj_bias": True}
    path, prompt = save_tiny_granite_hybrid(tmp_path, **options), random_prompt(40)
    expected = reference_logits(checkpoints.load_reference(path), prompt)
    logits = begin(path, computed_by, 40)().step(prompt)
    assert relative_error(logits, expected) < RELATIVE_ERROR


@pytest.mark.parametrize("computed_by", KERNELS)
@pytest.mark.parametrize(
    ("build", "options"),
    [
        (save_tiny_falcon_h1, {}),
        (save_tiny_falcon_h1, NORM_BEHIND_THE_GATE),
        (save_tiny_falcon_h1, BIASES),
        (save_tiny_nemotron_latent, {}),
    ],
)
def test_other_forms(build: checkpoints.Builder, options: dict[str, Any], computed_by: str, tmp_path: Path) -> None:
    """Mixers side by side; a norm behind or before the gate, biases, a width that follows from others; experts of
    another width.
    """
    path, prompt = build(tmp_path, **options), random_prompt(40)
    expected = reference_logits(checkpoints.load_reference(path), prompt)
    logits = begin(path, computed_by, 40)().step(prompt)
    assert relative_error(logits, expected) < RELATIVE_ERROR


@pytest.mark.parametrize("computed_by", [pytest.param("torch", marks=pytest.mark.slow), "native"])
@pytest.mark.parametrize("family", checkpoints.family_params(FAMILIES))
def test_errors_do_not_grow_over_2000_tokens(family: str, computed_by: str, tmp_path: Path) -> None:
    path = FAMILIES[family](tmp_path, max_position_embeddings=4096)
    check_2000_tokens(path, begin(path, computed_by, 2000))


@pytest.fixture(scope="module", params=checkpoints.family_params(FAMILIES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"vocab_size": NUM_TOKENS, "eos_token_id": NUM_TOKENS - 1, "max_position_embeddings": 4096}
    return write_byte_tokenizer(FAMILIES[request.param](tmp_path_factory.mktemp(request.param), **sizes))


def random_requests(seed: int, number: int, longest: int) -> tuple[dict[str, list[int]], dict[str, SamplingParams]]:
    """Prompts of 1 to `longest` tokens by name; half of them greedy, half sampled."""
    rng = random.Random(seed)
    prompts = {f"r{i}": [rng.randrange(256) for _ in range(rng.randint(1, longest))] for i in range(number)}
    params = {
        name: SamplingParams(temperature=i % 2, seed=i, max_tokens=20, ignore_eos=True)
        for i, name in enumerate(prompts)
    }
    return prompts, params


def serve(engine: Engine, prompts: dict[str, list[int]], params: dict[str, SamplingParams]) -> dict[str, list[int]]:
    """All at once, until nothing is left."""
    for name, prompt in prompts.items():
        engine.add_request(prompt, params[name], request_id=name)
    outputs = drain(engine)
    assert engine.kv_usage.used == 0
    return {name: token_ids(outputs[name, 0]) for name in prompts}


def test_requests_that_share_small_steps_get_the_tokens_they_get_alone(checkpoint: Path) -> None:
    prompts, params = random_requests(3, 6, 60)
    expected = serve_alone(checkpoint, prompts, params, prefix_caching=False, max_num_batched_tokens=256, **PYTHON)
    engine = tiny_engine(checkpoint, max_num_batched_tokens=11, max_num_running=6, block_size=8, **PYTHON)
    assert serve(engine, prompts, params) == expected


def test_on_the_compiled_kernels_no_bit_depends_on_cuts_or_on_what_shares_a_step(checkpoint: Path) -> None:
    """In bfloat16, where near ties are common."""
    load_or_skip()
    prompts, params = random_requests(5, 6, 90)
    native = {"dtype": "bfloat16", "native_kernels": True, "attention_backend": "native"}
    expected = serve_alone(checkpoint, prompts, params, prefix_caching=False, max_num_batched_tokens=256, **native)
    engine = tiny_engine(checkpoint, max_num_batched_tokens=11, max_num_running=6, block_size=8, **native)
    assert serve(engine, prompts, params) == expected


def test_preempted_equals_undisturbed(checkpoint: Path) -> None:
    """The pool holds exactly one request of full length, so that growing ones push each other out again and again."""
    prompts, params = random_requests(6, 3, 14)
    params = {name: replace(each, max_tokens=50) for name, each in params.items()}
    cache_bytes = least_kv_cache_bytes(checkpoint, 64, 16, "float32")
    tight = {"max_model_len": 64, "max_num_batched_tokens": 16, "max_num_running": 16, "kv_cache_bytes": cache_bytes}
    engine = tiny_engine(checkpoint, **tight, **PYTHON)
    assert serve(engine, prompts, params) == serve_alone(checkpoint, prompts, params, **PYTHON)
    assert engine.counters.num_preemptions >= 2


def test_a_prefix_is_found_at_the_end_of_the_prompt_that_had_it(checkpoint: Path) -> None:
    """Of 1,100 shared tokens all whole blocks. Of 1,050 a prompt finds 1,024 and the next one all whole blocks: where
    the first one parted, as layers of attention showed, a state was kept.
    """
    rng = random.Random(7)
    shared = [rng.randrange(256) for _ in range(1100)]
    prompts = {f"r{i}": [*shared, *(rng.randrange(256) for _ in range(9 * i))] for i in range(3)}
    prompts |= {f"r{i}": [*shared[:1050], *(rng.randrange(256) for _ in range(40))] for i in (3, 4)}
    params = {name: SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True) for name in prompts}
    sizes = {"max_model_len": 1536, "max_num_batched_tokens": 512, "kv_cache_bytes": 4 << 20}
    expected = serve_alone(checkpoint, prompts, params, prefix_caching=False, **sizes, **PYTHON)
    num_parting = 1024 if checkpoint.name.startswith("mamba2") else 1040
    engine, num_cached = tiny_engine(checkpoint, **sizes, **PYTHON), 0
    for name, num_found in zip(prompts, (0, 1088, 1088, 1024, num_parting), strict=True):
        assert serve(engine, {name: prompts[name]}, params)[name] == expected[name]
        num_cached += num_found
        assert engine.counters.num_cached_prompt_tokens == num_cached


def test_a_chat_goes_on_from_the_end_of_its_last_answer(checkpoint: Path) -> None:
    """Turns of any length find all whole blocks of the chat before its last token in the cache."""
    rng = random.Random(11)
    engine, chat = tiny_engine(checkpoint, block_size=8, **PYTHON), list[int]()
    num_cached = 0
    for turn, (num_asked, num_told) in enumerate([(20, 13), (9, 16), (31, 1), (8, 24)]):
        before = len(chat)
        chat += [rng.randrange(256) for _ in range(num_asked)]
        params = {"r": SamplingParams(temperature=0.0, max_tokens=num_told, ignore_eos=True)}
        alone = serve_alone(checkpoint, {"r": chat}, params, **PYTHON)["r"]
        assert serve(engine, {"r": list(chat)}, params)["r"] == alone
        num_cached += max(0, before - 1) // 8 * 8
        assert engine.counters.num_cached_prompt_tokens == num_cached, turn
        chat += alone


def test_aborts_leave_nothing_and_change_no_other_tokens(checkpoint: Path) -> None:
    """Aborted before, in and after their prompts; what they held is used by others at once."""
    prompts, params = random_requests(8, 8, 60)
    kept = {name: prompts[name] for name in ("r1", "r4", "r7")}
    expected = serve_alone(checkpoint, kept, params, **PYTHON)
    engine = tiny_engine(checkpoint, max_num_batched_tokens=16, max_num_running=4, block_size=8, **PYTHON)
    for name, prompt in prompts.items():
        engine.add_request(prompt, params[name], request_id=name)
    found: dict[str, list[int]] = {name: [] for name in kept}
    doomed = [name for name in prompts if name not in kept]
    assert engine.abort(doomed.pop())
    num_steps = 0
    while engine.has_work:
        num_steps += 1
        for output in engine.step():
            if output.request_id in found:
                found[output.request_id] += output.token_ids
        if doomed and num_steps % 2:
            assert engine.abort(doomed.pop(0)), "it had ended before"
        engine.check()
    assert not doomed
    assert found == expected
    assert (engine.kv_usage.used, engine.num_running, engine.num_waiting) == (0, 0, 0)
