"""Prefill and decode in processes of their own give the tokens that one engine gives, and transformers.

Real processes, gRPC, transports and Redis; every block that moves is compared. Each cluster serves one of the model
families, so that together they cover families, transports, block sizes, topologies and both locality indexes.
"""

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tandem.core.sampling_params import SamplingParams
from tandem.core.scope import UNSCOPED
from tandem.core.timeline import Stage
from tandem.rpc.messages import GenerateCall, PairCall
from tests.helpers.checkpoints import BUILDERS, EXPERT_BUILDERS, MORE_BUILDERS
from tests.helpers.cluster import Cluster, running_cluster
from tests.helpers.heads import HEAD_BUILDERS
from tests.helpers.hybrid_checkpoints import RECURRENT_BUILDERS
from tests.helpers.mixes import EOS, expected, random_mix, random_prompt, transformers_greedy
from tests.helpers.redis_server import running_redis
from tests.helpers.serving_clients import (
    Ask,
    Reply,
    addresses,
    complete,
    complete_all,
    generate_at,
    is_idle,
    num_drafted,
    pair,
    timeline,
)
from tests.helpers.sparse_checkpoints import BLOCK_BUILDERS
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer

NUM_ASKS = 28
_GROUPS = {"gemma3": 2, "gemma4": 3, "gpt_oss": 2, "falcon_h1": 2, "deepseek_v4": 11} | dict.fromkeys(
    ("glm_moe_dsa", "minimax_m3", "granite_hybrid", "lfm2_moe", "nemotron_h", "qwen3_next_mtp", "kimi_linear"), 3
)
_MIX_SEEDS = {"gemma4_moe": 4}  # NOTE: in mix 3 two tokens tie to 1e-6, which PyTorch and compiled kernels round apart
NUM_AT_ONCE = 8
WORKER_FLAGS = (
    *("--dtype", "float32", "--kv-cache-gib", "0.01", "--max-model-len", "256"),
    *("--max-num-batched-tokens", "64", "--max-num-running", "32", "--checksum-share", "1"),
)
ALWAYS = ("--num-speculative-tokens", "4", "--draft-always")
SPECULATE = ("--speculate", "auto", *ALWAYS)
DRAFT_ITSELF = ("--speculate", "draft={model}", *ALWAYS)
EAGLE = ("--speculate", "eagle={model}/eagle", *ALWAYS)
MTP = ("--speculate", "mtp", *ALWAYS)
NO_LOCAL_PREFILL = ("--max-local-tokens", "0")
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, seed=1)
SAMPLED = SamplingParams(temperature=1.2, top_p=0.95, max_tokens=24, ignore_eos=True, seed=77)


@dataclass(frozen=True)
class Setup:
    """A cluster and the family it serves. In `worker_flags`, `{model}` is its checkpoint."""

    family: str
    prefill: int
    decode: int
    transport: str = "nixl"
    block_size: int = 16
    redis: bool = False
    router_flags: Sequence[str] = NO_LOCAL_PREFILL
    worker_flags: Sequence[str] = ()

    @contextlib.contextmanager
    def running(self, model: Path) -> Iterator[Cluster]:
        worker_flags = (flag.format(model=model) for flag in self.worker_flags)
        with contextlib.ExitStack() as opened:
            redis = opened.enter_context(running_redis()).url if self.redis else None
            yield opened.enter_context(
                running_cluster(
                    model,
                    prefill=self.prefill,
                    decode=self.decode,
                    redis=redis,
                    transport=self.transport,
                    block_size=self.block_size,
                    extra={"worker": (*WORKER_FLAGS, *worker_flags), "router": self.router_flags},
                )
            )


SETUPS = {
    "1p1d-nixl-16": Setup("llama", 1, 1),
    "2p2d-tcp-32-redis": Setup("qwen3", 2, 2, "tcp", 32, True, (*NO_LOCAL_PREFILL, "--policy", "random")),
    "3p1d-nixl-16-redis": Setup("gemma3", 3, 1, "nixl", 16, True),
    "2p1d-tcp-16-speculating": Setup("gemma4", 2, 1, "tcp", worker_flags=DRAFT_ITSELF),
    "1p1d-tcp-16-eagle": Setup("llama_eagle", 1, 1, "tcp", worker_flags=EAGLE),
    "1p1d-nixl-8-mtp": Setup("deepseek_v3_mtp", 1, 1, "nixl", 8, worker_flags=MTP),
    "2p2d-tcp-16-eagle": Setup("llama_eagle", 2, 2, "tcp", 16, False, (*NO_LOCAL_PREFILL, "--policy", "random"), EAGLE),
    "2p2d-nixl-8-mtp": Setup("deepseek_v3_mtp", 2, 2, "nixl", 8, False, (*NO_LOCAL_PREFILL, "--policy", "random"), MTP),
    "aggregated-32-speculating": Setup("gemma3", 0, 1, "auto", 32, worker_flags=SPECULATE),
    "1p1d-tcp-16-experts": Setup("qwen3_moe", 1, 1, "tcp"),
    "1p1d-nixl-16-sinks": Setup("gpt_oss", 1, 1),
    "2p1d-tcp-8-two-experts": Setup("mixtral", 2, 1, "tcp", 8),
    "1p1d-nixl-8-shared-expert": Setup("glm4_moe", 1, 1, "nixl", 8),
    "2p1d-nixl-16-corrected-router": Setup("minimax_m2", 2, 1),
    "1p1d-nixl-8-latents": Setup("deepseek_v3", 1, 1, "nixl", 8),
    "2p2d-tcp-16-latents": Setup("deepseek_v3", 2, 2, "tcp", router_flags=(*NO_LOCAL_PREFILL, "--policy", "random")),
    "1p1d-nixl-8-sparse": Setup("deepseek_v32", 1, 1, "nixl", 8),
    "2p2d-tcp-16-sparse": Setup("glm_moe_dsa", 2, 2, "tcp", router_flags=(*NO_LOCAL_PREFILL, "--policy", "random")),
    "1p1d-nixl-8-entries": Setup("deepseek_v4", 1, 1, "nixl", 8),
    "1p1d-nixl-16-blocks": Setup("minimax_m3", 1, 1),
    "1p1d-tcp-16-means": Setup("moba", 1, 1, "tcp"),
    "2p2d-tcp-8-compressed": Setup("nsa", 2, 2, "tcp", 8, router_flags=(*NO_LOCAL_PREFILL, "--policy", "random")),
    "1p1d-nixl-16-recurrent": Setup("granite_hybrid", 1, 1),
    "2p2d-tcp-8-recurrent-speculating": Setup(
        "lfm2_moe", 2, 2, "tcp", 8, False, (*NO_LOCAL_PREFILL, "--policy", "random"), SPECULATE
    ),
    "1p1d-nixl-16-delta-mtp": Setup("qwen3_next_mtp", 1, 1, worker_flags=MTP),
    "2p2d-tcp-8-delta": Setup("kimi_linear", 2, 2, "tcp", 8, router_flags=(*NO_LOCAL_PREFILL, "--policy", "random")),
    "1p1d-nixl-16-squared": Setup("nemotron_h", 1, 1),
    "1p1d-tcp-16-recurrences": Setup("mamba2", 1, 1, "tcp"),
    "1p1d-nixl-8-side-by-side": Setup("falcon_h1", 1, 1, "nixl", 8),
    "1p1d-as-it-comes": Setup("mistral", 1, 1, "auto", router_flags=()),
}
_RANDOM = (*NO_LOCAL_PREFILL, "--policy", "random")
_KINDS = (
    "deepseek_v3",
    "deepseek_v4",
    "glm_moe_dsa",
    "minimax_m3",
    "granite_hybrid",
    "kimi_linear",
    "falcon_h1",
    "jamba",
    "mamba2",
)
_FAMILIES = BUILDERS | EXPERT_BUILDERS | MORE_BUILDERS | RECURRENT_BUILDERS | BLOCK_BUILDERS
_LIKE_KINDS = ("deepseek_v2", "glm4_moe_lite", "lfm2", "mistral4", "nemotron_latent", "qwen3_5", "qwen3_5_moe")
"""Families with kinds of state that those in `_KINDS` have too."""
OTHER_SETUPS = (
    {
        f"1p1d-{transport}-{family}": Setup(family, 1, 1, transport)
        for transport, families in {
            "nixl": ("gemma4_moe", "granite", "jamba", "olmo2", "phi3", "glm_moe_dsa", "kimi_linear", "mamba2"),
            "tcp": ("qwen2_moe", "ministral3", "olmo3", "smollm3", *_KINDS[:-1]),
        }.items()
        for family in (*families, *_LIKE_KINDS)
    }
    | {
        f"2p2d-{transport}-{family}": Setup(family, 2, 2, transport, router_flags=_RANDOM)
        for transport in ("nixl", "tcp")
        for family in (*_KINDS, *_LIKE_KINDS)
    }
    | {
        f"{number}p{number}d-tcp-{family}-speculating": Setup(
            family, number, number, "tcp", router_flags=_RANDOM, worker_flags=SPECULATE
        )
        for number in (1, 2)
        for family in sorted(_FAMILIES)
    }
)
"""Of families whose parts others have too, and each kind of state over both networks: the random mix is tested. Of all
families with drafts from the text.
"""
RECURRENCES = ("mamba2",)
"""Families that keep one state a request and nothing a token."""
# NOTE: what is expected of them is compared with `NaiveModel`, in `tests/golden/test_block_sparse.py`
NOT_IN_TRANSFORMERS = {"moba", "nsa"}
DISAGGREGATED = [name for name, setup in SETUPS.items() if setup.prefill and setup.router_flags]
QUICK = ("1p1d-nixl-16", "2p2d-tcp-32-redis")
"""Clusters of which every property is tested by `make test`; of the others the random mix is."""
SLOW = (
    *("2p2d-tcp-16-latents", "2p2d-tcp-16-sparse", "1p1d-nixl-8-mtp", "1p1d-nixl-16-delta-mtp", "2p2d-tcp-8-delta"),
    *("1p1d-tcp-16-recurrences", "2p2d-tcp-16-eagle", "2p2d-nixl-8-mtp"),
    *OTHER_SETUPS,
    *("1p1d-nixl-16-blocks", "1p1d-tcp-16-means", "2p2d-tcp-8-compressed"),
    *("1p1d-nixl-16-sinks", "2p1d-tcp-8-two-experts", "1p1d-nixl-8-shared-expert", "2p1d-nixl-16-corrected-router"),
)
"""Clusters of which `make test` tests nothing."""
QUICK_FAMILIES = {setup.family for name, setup in SETUPS.items() if name not in SLOW}
BY_COST = [
    name
    for name in DISAGGREGATED
    if SETUPS[name].router_flags is NO_LOCAL_PREFILL and SETUPS[name].family not in RECURRENCES
]


def clusters(names: Sequence[str]) -> list[Any]:
    """Parameters of a test that is slow but for two clusters."""
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


@dataclass(frozen=True)
class Running:
    """A cluster that runs."""

    setup: Setup
    model: Path
    cluster: Cluster

    def expect_idle(self) -> None:
        self.cluster.wait(lambda: is_idle(self.cluster), 5.0)


@dataclass
class Models:
    """Checkpoints and what each must answer, made once."""

    directory: Path
    _replies: dict[str, tuple[list[Ask], list[list[Reply]]]] = field(default_factory=dict)

    def path(self, family: str) -> Path:
        path = self.directory / family
        if not path.exists():
            builders = _FAMILIES | HEAD_BUILDERS
            builders[family](path, vocab_size=NUM_TOKENS, eos_token_id=EOS)
            write_byte_tokenizer(path)
        return path

    def mix(self, family: str) -> tuple[list[Ask], list[list[Reply]]]:
        if family not in self._replies:
            asks = random_mix(self.path(family), _MIX_SEEDS.get(family, 3), NUM_ASKS)
            self._replies[family] = asks, expected(self.path(family), asks)
        return self._replies[family]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def anything(request: pytest.FixtureRequest, models: Models) -> Iterator[Running]:
    """The cluster that a test names."""
    setup = (SETUPS | OTHER_SETUPS)[request.param]
    path = models.path(setup.family)
    with setup.running(path) as cluster:
        yield Running(setup, path, cluster)


@pytest.fixture
def running(anything: Running) -> Iterator[Running]:
    """A cluster that does nothing yet, and in the end nothing any more."""
    anything.expect_idle()
    try:
        yield anything
    except BaseException as error:
        error.add_note(anything.cluster.logs())
        raise
    anything.expect_idle()


@pytest.mark.parametrize(
    "anything",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in SETUPS | OTHER_SETUPS],
    indirect=True,
)
def test_a_random_mix(running: Running, models: Models) -> None:
    """Everything at once over HTTP: each request as if it were alone, and its KV really came from a prefill worker."""
    asks, wanted = models.mix(running.setup.family)
    request_ids, got = complete_all(running.cluster, asks, NUM_AT_ONCE)
    assert {i: replies for i, replies in enumerate(got) if replies != wanted[i]} == {}
    is_always_moved = running.setup.prefill > 0 and bool(running.setup.router_flags)
    for request_id, replies in zip(request_ids, got, strict=True):
        stages = timeline(running.cluster, request_id)
        assert _computed_at(stages) <= set(running.cluster.names("prefill"))
        if is_always_moved and len(replies[0].token_ids) > 1:  # NOTE: one token needs no KV in decode
            assert _sources(stages), "\n".join(map(str, stages))
    if "--speculate" in running.setup.worker_flags:
        words = (21, 22, 23)
        repeats = Ask(words * 8, replace(GREEDY, allowed_token_ids=words))
        assert complete(running.cluster, repeats)[1] == expected(running.model, [repeats])[0]
        running.cluster.wait(lambda: num_drafted(running.cluster) > 0, 5.0)  # NOTE: workers count them a little later


@pytest.mark.parametrize("anything", ["2p2d-tcp-32-redis"], indirect=True)
def test_every_pair_of_workers_serves(running: Running) -> None:
    """All four are asked for in all but one of ten million runs."""
    rng = random.Random(4)
    asks = [Ask(random_prompt(rng, 40), replace(GREEDY, max_tokens=4)) for _ in range(60)]
    request_ids, got = complete_all(running.cluster, asks, NUM_AT_ONCE)
    assert got == expected(running.model, asks)
    sources = {source for request_id in request_ids for source in _sources(timeline(running.cluster, request_id))}
    assert len(sources) == running.setup.prefill * running.setup.decode


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in QUICK_FAMILIES else pytest.mark.slow)
        for family in sorted({setup.family for setup in (SETUPS | OTHER_SETUPS).values()} - NOT_IN_TRANSFORMERS)
    ],
)
def test_what_was_expected_is_what_transformers_says(family: str, models: Models) -> None:
    """The greedy, plain ones of the mix."""
    asks, wanted = models.mix(family)
    plain = [i for i, ask in enumerate(asks) if _is_plain(ask.params)]
    assert len(plain) > 5
    told = transformers_greedy(models.path(family), [asks[i] for i in plain])
    assert [wanted[i][0].token_ids for i in plain] == told


@pytest.mark.parametrize("anything", clusters(DISAGGREGATED), indirect=True)
def test_answers_of_one_token_leave_nothing_behind(running: Running) -> None:
    """They end while decode hears the last of prefill: it was cancelled when it was about to release the lease, which
    then held its blocks for its whole time.
    """
    rng = random.Random(12)
    asks = [Ask(random_prompt(rng, 40), replace(GREEDY, max_tokens=1)) for _ in range(150)]
    _, replies = complete_all(running.cluster, asks, NUM_AT_ONCE)
    assert {len(reply.token_ids) for (reply,) in replies} == {1}


@pytest.mark.parametrize("anything", clusters(DISAGGREGATED), indirect=True)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("held_by_decode", [False, True], ids=["", "decode"])
@pytest.mark.parametrize("held_by_prefill", [False, True], ids=["", "prefill"])
def test_prefixes_that_either_side_holds(
    running: Running, params: SamplingParams, held_by_prefill: bool, held_by_decode: bool
) -> None:
    """Workers chosen by the test: what decode holds is not sent again, what prefill holds not computed again."""
    workers = addresses(running.cluster)
    prefill, decode = workers["prefill-0"], workers["decode-0"]
    rng = random.Random(f"{params} {held_by_prefill} {held_by_decode}")
    ask = Ask(random_prompt(rng, 150), params)
    first = Ask(ask.prompt[:100], replace(params, max_tokens=1))
    for worker in [prefill] * held_by_prefill + [decode] * held_by_decode:
        generate_at(_call(first, decode=worker))
    reply, stages = generate_at(replace(_call(ask, decode=decode), prefill=prefill))
    assert [reply] == expected(running.model, [ask])[0]
    num_held = 96  # NOTE: whole blocks of 100 tokens, with either block size
    (queue,) = [stage for stage in stages if stage.name == "queue" and stage.process == prefill.worker_id]
    assert queue.attributes["num_cached_tokens"] == num_held * held_by_prefill
    num_lacking = 150 - num_held * held_by_decode
    num_groups = _num_groups(running.setup.family)
    num_blocks = _num_blocks(stages, decode.worker_id, prefill.worker_id)
    most = -(-num_lacking // running.setup.block_size)
    least = 1 if running.setup.family in RECURRENCES else most
    assert least <= num_blocks <= num_groups * most


@pytest.mark.parametrize("anything", clusters(DISAGGREGATED), indirect=True)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_prefill_fetches_what_decode_generated(running: Running, params: SamplingParams) -> None:
    """The second turn of a conversation, by workers that the test chose: prefill computes only what is new."""
    workers = addresses(running.cluster)
    prefill, decode = workers[running.cluster.names("prefill")[-1]], workers["decode-0"]
    rng = random.Random(f"turns {params}")
    first = Ask(random_prompt(rng, 70), replace(params, max_tokens=60))
    told, _ = generate_at(replace(_call(first, decode=decode), prefill=prefill))
    second = Ask(first.prompt + told.token_ids + random_prompt(rng, 40), params)
    call = replace(_call(second, decode=decode), prefill=prefill, fetch_from=decode)
    reply, stages = generate_at(replace(call, num_fetch_blocks=128 // running.setup.block_size))
    assert [[told], [reply]] == expected(running.model, [first, second])
    assert _num_blocks(stages, prefill.worker_id, decode.worker_id) > 0
    assert _num_blocks(stages, decode.worker_id, prefill.worker_id) > 0
    computed = [stage.attributes["num_tokens"] for stage in stages if stage.name == "prefill chunk"]
    assert sum(map(int, computed)) == 170


@pytest.mark.parametrize("anything", clusters(BY_COST), indirect=True)
def test_second_turn_over_http(running: Running) -> None:
    """The router sees by itself that fetching is quicker than computing, once it knows what decode holds. A router
    whose index does not answer in time pairs without it: then another conversation shows it.
    """
    cluster, rng = running.cluster, random.Random(8)
    for _ in range(3):
        first = Ask(random_prompt(rng, 20), replace(GREEDY, max_tokens=180))
        _, (told,) = complete(cluster, first)
        second = Ask(first.prompt + told.token_ids + (3, 4), SAMPLED)
        cluster.wait(partial(_would_fetch, cluster, second, rng))
        request_id, (reply,) = complete(cluster, second, stream=True)
        assert [[told], [reply]] == expected(running.model, [first, second])
        stages = timeline(cluster, request_id)
        (paired,) = [stage for stage in stages if stage.name == "pair"]
        if "fetch_from" in paired.attributes:
            break
    prefill_id = str(paired.attributes["prefill"])
    assert paired.attributes["fetch_from"] == "decode-0"
    assert _num_blocks(stages, prefill_id, "decode-0") >= 10
    assert _num_blocks(stages, "decode-0", prefill_id) > 0


def _would_fetch(cluster: Cluster, ask: Ask, rng: random.Random) -> bool:
    """Whether prefill would fetch what decode holds. Speeds are learnt from what is computed, so something is."""
    complete(cluster, Ask(random_prompt(rng, 150), replace(GREEDY, max_tokens=1)))
    question = PairCall(
        request_id="question", model=cluster.model, token_ids=ask.prompt, num_expected_output=24, scope=UNSCOPED
    )
    return pair(cluster, question).num_fetch_blocks >= 11  # NOTE: prefill has one itself, of the first prompt


def _call(ask: Ask, **chosen: object) -> GenerateCall:
    call = GenerateCall(request_id="direct", prompt_token_ids=ask.prompt, params=ask.params, scope=UNSCOPED)
    return replace(call, **chosen)  # type: ignore[arg-type]


def _is_plain(params: SamplingParams) -> bool:
    return params == replace(GREEDY, max_tokens=params.max_tokens, seed=params.seed)


def _num_groups(family: str) -> int:
    """Kinds of layers: each has blocks of its own."""
    return _GROUPS.get(family, 1)


def _transfers(stages: Sequence[Stage]) -> list[Stage]:
    return [stage for stage in stages if stage.name == "transfer" and int(stage.attributes["num_blocks"]) > 0]


def _computed_at(stages: Sequence[Stage]) -> set[str]:
    """Processes that computed at least a part of the prompt."""
    return {stage.process for stage in stages if stage.name == "prefill chunk"}


def _sources(stages: Sequence[Stage]) -> set[tuple[str, str]]:
    """(Prefill worker, decode worker) of each transfer of a prompt that a prefill worker computed."""
    computed_at = _computed_at(stages)
    found = {(str(stage.attributes["source"]), stage.process) for stage in _transfers(stages)}
    return {(source, process) for source, process in found if source in computed_at and source.startswith("prefill-")}


def _num_blocks(stages: Sequence[Stage], reader_id: str, source_id: str) -> int:
    found: list[Mapping[str, str | int | float]] = [
        stage.attributes for stage in _transfers(stages) if stage.process == reader_id
    ]
    return sum(int(attributes["num_blocks"]) for attributes in found if attributes["source"] == source_id)
