"""A new version of a model rolls in under its old name: real processes, both versions at once, under load.

Their weights differ, so a stream that used KV of the other version would have other tokens.
"""

import itertools
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tandem.core.sampling_params import SamplingParams
from tests.helpers.checkpoints import save_tiny_llama
from tests.helpers.cluster import Cluster, running_cluster
from tests.helpers.mixes import EOS, expected, random_prompt
from tests.helpers.redis_server import running_redis
from tests.helpers.serving_clients import Ask, Reply, body_of, complete, is_idle
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer

WORKER_FLAGS = ("--dtype", "float32", "--kv-cache-gib", "0.02", "--max-model-len", "16384", "--checksum-share", "1")
ROUTER_FLAGS = ("--max-local-tokens", "0", "--policy", "random")
ASKS = [
    Ask(random_prompt(random.Random(length), length), SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
    for length in (40, 75, 120, 160)
]
LONG = Ask(random_prompt(random.Random(9), 60), SamplingParams(temperature=0.0, max_tokens=16000, ignore_eos=True))


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    paths = []
    for seed in (1, 2):
        path = tmp_path_factory.mktemp(f"v{seed}") / "model"
        save_tiny_llama(path, seed=seed, vocab_size=NUM_TOKENS, eos_token_id=EOS, max_position_embeddings=16384)
        paths.append(write_byte_tokenizer(path))
    return paths[0], paths[1]


@pytest.fixture(scope="module")
def answers(versions: tuple[Path, Path]) -> list[list[Reply]]:
    """Of each version, to each of ASKS."""
    return [[replies[0] for replies in expected(path, ASKS)] for path in versions]


@pytest.fixture
def cluster(versions: tuple[Path, Path]) -> Iterator[Cluster]:
    flags = {"worker": WORKER_FLAGS, "router": ROUTER_FLAGS}
    with (
        running_redis() as redis,
        running_cluster(versions[0], prefill=2, decode=2, redis=redis.url, extra=flags) as cluster,
    ):
        try:
            yield cluster
        except BaseException as error:
            error.add_note(cluster.logs())
            raise


def roll(cluster: Cluster, names: Sequence[str], old: Path, new: Path) -> None:
    """Drain them and start them again with the other version, as a rolling update does with a pod of each pool."""
    processes = [cluster.processes[name] for name in names]
    for process in processes:
        process.terminate()
    for process in processes:
        assert process.wait() == 0, process.tail()
        argv = (str(new) if arg == str(old) else arg for arg in process.spec.argv)
        process.spec = replace(process.spec, argv=tuple(argv))
    cluster.start()


def ask_all(cluster: Cluster) -> list[tuple[str, Reply]]:
    """(Id, reply) of each of ASKS, twice, the second time with what the first has left in the caches."""
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda ask: complete(cluster, ask, stream=True), ASKS * 2))
    return [(request_id, reply) for request_id, (reply,) in done]


def decisions(cluster: Cluster) -> dict[str, tuple[str | None, str | None]]:
    """The workers that each request was paired with, the last time it was."""
    told = cluster.get("/admin/decisions?last=1000")["decisions"]
    return {decision["request_id"]: (decision["prefill_id"], decision["decode_id"]) for decision in told}


def test_versions_of_a_model_coexist_and_are_never_mixed(
    cluster: Cluster, versions: tuple[Path, Path], answers: list[list[Reply]]
) -> None:
    old, new = versions
    assert not set(answers[0]) & set(answers[1]), "the versions must differ in every answer"
    assert [reply for _, reply in ask_all(cluster)] == answers[0] * 2
    stopped = threading.Event()
    streamed: list[Reply] = []
    paired: dict[str, tuple[str | None, str | None]] = {}

    def load() -> None:
        for index in itertools.cycle(range(len(ASKS))):
            if stopped.is_set():
                return
            _, (reply,) = complete(cluster, ASKS[index], stream=True)
            assert reply in (answers[0][index], answers[1][index])
            streamed.append(reply)

    with ThreadPoolExecutor(2) as pool:
        loads = [pool.submit(load) for _ in range(2)]
        try:
            roll(cluster, ("prefill-1", "decode-1"), old, new)
            both = ask_all(cluster)
            cluster.wait(lambda: paired.update(decisions(cluster)) or paired.keys() >= {asked for asked, _ in both})
            roll(cluster, ("prefill-0", "decode-0"), old, new)
        finally:
            stopped.set()
        for one in loads:
            one.result()
    assert {*answers[0], *answers[1]} >= set(streamed)
    for index, (request_id, reply) in enumerate(both):
        version = [replies[index % len(ASKS)] for replies in answers].index(reply)
        assert paired[request_id] == (f"prefill-{version}", f"decode-{version}")
    assert [reply for _, reply in ask_all(cluster)] == answers[1] * 2
    cluster.wait(lambda: is_idle(cluster), 5.0)


def test_a_stream_is_not_continued_by_another_version(cluster: Cluster, versions: tuple[Path, Path]) -> None:
    """Its last worker of that version dies: it ends with an error, never with tokens of the other."""
    old, new = versions
    roll(cluster, ("prefill-1", "decode-1"), old, new)
    cluster.processes["prefill-1"].stop()  # NOTE: so that the router leaves new requests to the old version
    cluster.processes["decode-1"].stop()
    cluster.wait(lambda: sum(one["is_alive"] for one in cluster.workers() if "blocks" in one) == 2)
    body = body_of(LONG, cluster.model, stream=True)
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=60, trust_env=False) as answer:
        lines = answer.iter_lines()
        got = [next(line for line in lines if line.startswith("data: ")) for _ in range(3)]
        cluster.processes["prefill-1"].cont()
        cluster.processes["decode-1"].cont()
        cluster.wait(lambda: sum(one["is_alive"] for one in cluster.workers() if "blocks" in one) == 4)
        cluster.processes["decode-0"].kill()
        got += [line for line in lines if line.startswith("data: ")]
    frames = [httpx.Response(200, text=line.removeprefix("data: ")).json() for line in got[:-1]]
    assert got[-1] == "data: [DONE]"
    token_ids = tuple(token for frame in frames for choice in frame.get("choices", ()) for token in choice["token_ids"])
    assert 0 < len(token_ids) < 16000
    assert "error" in frames[-1]
    for name in ("prefill-1", "decode-1"):
        cluster.processes[name].kill()
    cluster.processes["decode-0"].restart()
    cluster.wait(cluster.is_whole, 30.0)
    _, (told,) = complete(cluster, replace(LONG, params=replace(LONG.params, max_tokens=len(token_ids))))
    assert token_ids == told.token_ids
