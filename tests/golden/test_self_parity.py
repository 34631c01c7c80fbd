"""Same tokens, however they are computed: chunked = whole, cached = cold, batched = alone, preempted = undisturbed.

Each family serves random mixes of lengths, arrivals, priorities and sampling settings; every request must get exactly
the tokens it gets alone on a fresh engine. `BACKENDS` adds bfloat16 on the compiled kernels, where equality is bit for
bit.
"""

import itertools
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.compute.native.bindings import unavailable_reason
from tandem.core.output import RequestOutput
from tandem.core.sampling_params import SamplingParams
from tandem.engine.engine import Engine
from tests.helpers.checkpoints import BUILDERS, EXPERT_BUILDERS, MORE_BUILDERS, REPRESENTATIVES
from tests.helpers.engines import least_kv_cache_bytes, serve_alone, tiny_engine, token_ids
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer

NUM_REQUESTS = 14
PYTHON = {"dtype": "float32", "native_kernels": False, "attention_backend": "reference"}
COMPILED = {"native_kernels": True, "attention_backend": "native"}
BACKENDS = {
    "torch-float32": PYTHON,
    "native-float32": {"dtype": "float32", **COMPILED},
    "native-bfloat16": {"dtype": "bfloat16", **COMPILED},
}
FAMILIES = BUILDERS | EXPERT_BUILDERS | MORE_BUILDERS
QUICK = {
    *((family, "native-bfloat16") for family in REPRESENTATIVES),
    ("deepseek_v3", "native-float32"),
    *((family, "torch-float32") for family in ("llama", "gemma3")),
}
PAIRS = [
    pytest.param(pair, id="-".join(pair), marks=() if pair in QUICK else pytest.mark.slow)
    for pair in itertools.product(sorted(FAMILIES), sorted(BACKENDS))
]


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A family and what computes it."""
    found: tuple[str, str] = request.param
    return found


@pytest.fixture(scope="module")
def checkpoint(pair: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(pair[0])
    FAMILIES[pair[0]](path, vocab_size=NUM_TOKENS, eos_token_id=NUM_TOKENS - 1)
    return write_byte_tokenizer(path)


@pytest.fixture(scope="module")
def backend(pair: tuple[str, str]) -> dict[str, object]:
    options: dict[str, object] = dict(BACKENDS[pair[1]])
    if options["native_kernels"] and (reason := unavailable_reason()) is not None:
        pytest.skip(f"no compiled kernels: {reason}")
    return options


@pytest.fixture(scope="module")
def workload() -> dict[str, tuple[list[int], SamplingParams]]:
    """Prompts of 1 to 120 tokens, half of them sharing one of two prefixes; greedy and seeded sampling mixed."""
    rng = random.Random(5)
    prefixes = [[rng.randrange(256) for _ in range(length)] for length in (40, 70)]
    requests = {}
    for index in range(NUM_REQUESTS):
        prefix = rng.choice([[], [], *prefixes])
        prompt = prefix + [rng.randrange(256) for _ in range(rng.randint(1, 50))]
        requests[f"r{index}"] = (prompt, _params(rng, index))
    return requests


@pytest.fixture(scope="module")
def expected(
    checkpoint: Path, backend: dict[str, object], workload: dict[str, tuple[list[int], SamplingParams]]
) -> dict[str, list[int]]:
    """Each request alone, cold, its prompt in one piece."""
    prompts = {name: prompt for name, (prompt, _) in workload.items()}
    params = {name: params for name, (_, params) in workload.items()}
    return serve_alone(checkpoint, prompts, params, prefix_caching=False, max_num_batched_tokens=256, **backend)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_num_batched_tokens": 256}, id="batched"),
        pytest.param({"max_num_batched_tokens": 11, "max_num_running": 11}, id="chunked"),
        pytest.param({"max_num_batched_tokens": 32, "block_size": 8}, id="small-blocks"),
        pytest.param({"max_num_batched_tokens": 64, "prefix_caching": False}, id="uncached"),
    ],
)
def test_any_schedule_gives_the_same_tokens(
    checkpoint: Path,
    backend: dict[str, object],
    workload: dict[str, tuple[list[int], SamplingParams]],
    expected: dict[str, list[int]],
    options: dict[str, object],
) -> None:
    engine = tiny_engine(checkpoint, **{**backend, **options})
    assert _serve(engine, workload, seed=1) == expected
    assert engine.kv_usage.used == 0


def test_cached_equals_cold(
    checkpoint: Path,
    backend: dict[str, object],
    workload: dict[str, tuple[list[int], SamplingParams]],
    expected: dict[str, list[int]],
) -> None:
    engine = tiny_engine(checkpoint, **backend)
    _serve(engine, workload, seed=2)
    cached_before = engine.counters.num_cached_prompt_tokens
    assert _serve(engine, workload, seed=3) == expected
    assert engine.counters.num_cached_prompt_tokens > cached_before + 16 * NUM_REQUESTS


def test_preempted_equals_undisturbed(checkpoint: Path, backend: dict[str, object]) -> None:
    """The pool holds exactly one request of full length, so that growing ones push each other out again and again."""
    rng = random.Random(6)
    prompts = {f"r{index}": [rng.randrange(256) for _ in range(rng.randint(1, 14))] for index in range(6)}
    params = {name: replace(_params(rng, index), max_tokens=50) for index, name in enumerate(prompts)}
    cache_bytes = least_kv_cache_bytes(checkpoint, 64, 16, str(backend["dtype"]))
    tight = {"max_model_len": 64, "max_num_batched_tokens": 16, "max_num_running": 16, **backend}
    engine = tiny_engine(checkpoint, kv_cache_bytes=cache_bytes, **tight)
    workload = {name: (prompt, params[name]) for name, prompt in prompts.items()}
    assert _serve(engine, workload, seed=4) == serve_alone(checkpoint, prompts, params, **backend)
    assert engine.counters.num_preemptions >= 3


def _params(rng: random.Random, index: int) -> SamplingParams:
    max_tokens = rng.randint(1, 40)
    if index % 2:
        return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return SamplingParams(
        temperature=rng.choice([0.5, 1.0, 1.5]),
        top_k=rng.choice([0, 20]),
        top_p=rng.choice([1.0, 0.9]),
        repetition_penalty=rng.choice([1.0, 1.2]),
        frequency_penalty=rng.choice([0.0, 0.4]),
        seed=rng.randrange(1 << 30),
        max_tokens=max_tokens,
        ignore_eos=True,
    )


def _serve(engine: Engine, workload: Mapping[str, tuple[list[int], SamplingParams]], seed: int) -> dict[str, list[int]]:
    """Requests arrive in random order at random steps, with random priorities."""
    rng = random.Random(seed)
    arrivals = list(workload.items())
    rng.shuffle(arrivals)
    outputs: dict[str, list[RequestOutput]] = {name: [] for name in workload}
    while arrivals or engine.has_work:
        while arrivals and rng.random() < 0.5:
            name, (prompt, params) = arrivals.pop()
            engine.add_request(prompt, params, request_id=name, priority=rng.randint(-1, 1))
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.check()
    return {name: token_ids(items) for name, items in outputs.items()}
