"""The embedded index in threads: questions are answered truthfully while reports and snapshots come in."""

import hashlib
from concurrent.futures import ThreadPoolExecutor

from tandem.locality.base import PublishResult
from tandem.locality.embedded import EmbeddedIndex

BLOCKS = [hashlib.sha256(b"%d" % index).digest() for index in range(2000)]
TURNS = 30


def test_a_snapshot_is_seen_whole_or_not_at_all() -> None:
    index = EmbeddedIndex()

    def report(worker_id: str, length: int) -> None:
        for turn in range(TURNS):
            assert index.replace(worker_id, 1, BLOCKS[:length], turn) is PublishResult.APPLIED

    def ask() -> set[tuple[str, int]]:
        return {answer for _ in range(TURNS) for answer in index.leading_blocks(BLOCKS).items()}

    with ThreadPoolExecutor(4) as threads:
        reports = [threads.submit(report, "p0", 2000), threads.submit(report, "p1", 700)]
        answers = [threads.submit(ask) for _ in range(2)]
        seen = set().union(*(answer.result() for answer in answers))
        assert [report.result() for report in reports] == [None, None]
    assert seen <= {("p0", 2000), ("p1", 700)}
    assert index.leading_blocks(BLOCKS) == {"p0": 2000, "p1": 700}
    assert index.stats().num_block_replicas == 2700
