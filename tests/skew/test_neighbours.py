"""Neighbouring releases in one cluster answer as one release does: real processes of both, and a rolling update.

The other release is the wheel of an earlier commit, or a copy of this tree that speaks one protocol more.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.faults.streams import Answer, Asked, asked_of
from tests.helpers.cluster import ROOT, START_TIMEOUT_S, Cluster, running_cluster
from tests.helpers.engines import serve_alone
from tests.helpers.planner_process import PlannerProcess
from tests.helpers.redis_server import running_redis
from tests.helpers.serving_clients import is_idle, timeline

DEMO = ROOT / "demo" / "tandem-demo"
FLAGS: Mapping[str, Sequence[str]] = {
    "worker": (
        *("--dtype", "float32", "--kv-cache-gib", "0.1", "--max-model-len", "2048"),
        *("--checksum-share", "1", "--no-native-kernels"),
    ),
    "router": ("--max-local-tokens", "0"),
    "decode": ("--grace-s", "0.2"),  # NOTE: so that streams are not at their end when it ends
    "gateway": ("--failover-timeout-s", str(START_TIMEOUT_S)),
}
NAMES = ("gateway", "router-0", "prefill-0", "decode-0")
QUESTIONS = [asked_of(seed, 100, 12) for seed in (1, 2, 3)]
LONG = asked_of(4, 100, 800)
WHILE_REPLACED_S = 2 * START_TIMEOUT_S


@pytest.fixture(scope="module")
def answers() -> list[list[int]]:
    """To QUESTIONS, by this release alone, in this process."""
    alone = serve_alone(
        DEMO,
        {str(number): list(asked.prompt) for number, asked in enumerate(QUESTIONS)},
        {str(number): asked.params() for number, asked in enumerate(QUESTIONS)},
    )
    return list(alone.values())


@dataclass(frozen=True)
class Asking:
    """A cluster, and what one release alone answers to QUESTIONS."""

    cluster: Cluster
    answers: list[list[int]]
    _numbers: Iterator[int] = field(default_factory=count)

    def expect_same(self, computed_by: str = "prefill-0") -> None:
        """Prefill computes each prompt and decode reads its KV, or decode does all. A new salt shares no cache."""
        for asked, wanted in zip(QUESTIONS, self.answers, strict=True):
            request_id = f"question-{next(self._numbers)}"
            assert self._answer(asked.salted(request_id), request_id) == wanted
            stages = timeline(self.cluster, request_id)
            assert {stage.attributes["prefill"] for stage in stages if stage.name == "pair"} == {computed_by}
            moved = [stage for stage in stages if stage.name == "transfer" and stage.attributes["num_blocks"] != 0]
            assert {stage.attributes["source"] for stage in moved} == {computed_by} - {"decode-0"}, stages

    def story(self) -> list[int]:
        """All of a long answer."""
        return self._answer(LONG, f"story-{next(self._numbers)}")

    @contextmanager
    def streams(self, whole: list[int]) -> Iterator[None]:
        """Two run when the block begins, and come to the exact end of `story`."""
        with ExitStack() as open_streams:
            stories = [open_streams.enter_context(self._stream()) for _ in range(2)]
            for story in stories:
                story.wait(3)
            yield
            for story in stories:
                story.wait(timeout_s=WHILE_REPLACED_S)
                assert (story.error, story.token_ids) == (None, whole)

    def replace(self, name: str, root: Path, whole: list[int]) -> None:
        """SIGTERM while streams run, then the other release at the same address: as an update of one replica."""
        process = self.cluster.processes[name]
        with self.streams(whole):
            process.terminate()
            assert process.wait(WHILE_REPLACED_S) == 0, process.tail()
            process.root = root
            self.cluster.start()

    def _stream(self) -> Answer:
        request_id = f"story-{next(self._numbers)}"
        return Answer(self.cluster.url, self.cluster.model, LONG.salted(request_id), request_id)

    def _answer(self, asked: Asked, request_id: str) -> list[int]:
        with Answer(self.cluster.url, self.cluster.model, asked, request_id) as answer:
            answer.wait(timeout_s=WHILE_REPLACED_S)
            assert answer.error is None
            return answer.token_ids


def expect_no_mishap(cluster: Cluster) -> None:
    """Nothing is held, and no process met a bug."""
    cluster.wait(lambda: is_idle(cluster), 5.0)
    assert "Traceback" not in cluster.logs()


@pytest.mark.parametrize(
    "is_rolled_back",
    [pytest.param(False, id="update"), pytest.param(True, id="update and rollback", marks=pytest.mark.slow)],
)
@pytest.mark.timeout(900)
def test_a_rolling_update_and_its_rollback_lose_no_stream(
    previous: Path, answers: list[list[int]], is_rolled_back: bool
) -> None:
    """Every process in turn; with the way back, each pair is met both ways round."""
    with running_cluster(DEMO, extra=FLAGS, roots=dict.fromkeys(NAMES, previous)) as cluster:
        asking = Asking(cluster, answers)
        asking.expect_same()
        whole = asking.story()
        for root in (ROOT, previous) if is_rolled_back else (ROOT,):
            for name in NAMES:
                asking.replace(name, root, whole)
                asking.expect_same()
        expect_no_mishap(cluster)


@pytest.mark.parametrize(
    ("other", "of_the_other"),
    [
        ("previous", ("gateway", "prefill-0")),
        pytest.param("previous", ("router-0", "decode-0"), marks=pytest.mark.slow),
        pytest.param("following", ("gateway", "prefill-0"), marks=pytest.mark.slow),
        ("following", ("router-0", "decode-0")),
    ],
)
@pytest.mark.timeout(600)
def test_mixed_clusters_with_redis(
    other: str, of_the_other: tuple[str, ...], answers: list[list[int]], request: pytest.FixtureRequest
) -> None:
    """Both releases keep their records and the index of blocks in one Redis."""
    root: Path = request.getfixturevalue(other)
    with (
        running_redis() as redis,
        running_cluster(DEMO, extra=FLAGS, redis=redis.url, roots=dict.fromkeys(of_the_other, root)) as cluster,
    ):
        Asking(cluster, answers).expect_same()
        expect_no_mishap(cluster)


@pytest.mark.parametrize("of_the_other", [("planner",), pytest.param(NAMES, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_a_planner_reads_a_cluster_of_another_release(
    previous: Path, answers: list[list[int]], of_the_other: tuple[str, ...], tmp_path: Path
) -> None:
    """Routers' lists, workers' statuses and gateways' counters: a pool that it does not see, it would shrink."""
    root = previous if of_the_other == ("planner",) else ROOT
    roots = {name: previous for name in of_the_other if name in NAMES}
    with running_cluster(DEMO, extra=FLAGS, roots=roots) as cluster:
        asking = Asking(cluster, answers)

        def sees_all(page: dict[str, Any]) -> bool:
            asking.expect_same()
            seen = page["observation"]
            pools = [seen[role] for role in ("prefill", "decode")]
            return not page["problems"] and seen["traffic"]["num_finished"] and all(pool["speed"] for pool in pools)

        with closing(PlannerProcess(cluster, tmp_path, root=root)) as planner:
            page = planner.wait(sees_all)
            assert [page["observation"][role]["num_ready"] for role in ("prefill", "decode")] == [1, 1]
            assert page["plan"]["reason"]
            assert planner.terminate() == 0, planner.log()
        expect_no_mishap(cluster)


@pytest.mark.parametrize(
    "of_the_other",
    [("prefill-0",), pytest.param(("gateway", "router-0", "decode-0"), marks=pytest.mark.slow)],
)
@pytest.mark.timeout(600)
def test_releases_whose_blocks_have_other_hashes_share_no_cache(
    rehashed: Path, of_the_other: tuple[str, ...], answers: list[list[int]]
) -> None:
    """Not an error: until the update is complete, a decode worker without a partner computes prompts itself."""
    with (
        running_redis() as redis,
        running_cluster(DEMO, extra=FLAGS, redis=redis.url, roots=dict.fromkeys(of_the_other, rehashed)) as cluster,
    ):
        Asking(cluster, answers).expect_same(computed_by="decode-0")
        expect_no_mishap(cluster)
