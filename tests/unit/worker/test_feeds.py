"""A worker's reports go on through refusals."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence

import pytest

from tandem.core.clock import ManualClock
from tandem.core.events import BlockEvent, BlockStored
from tandem.locality.base import SILENT_S, LocalityStats, PublishResult
from tandem.locality.embedded import EmbeddedIndex
from tandem.worker import feeds
from tandem.worker.feeds import Feeds

BLOCK = bytes(32)


class PatientIndex:
    """An embedded index whose clock goes on by seconds with each refusal, and which says when a block is known."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.inner = EmbeddedIndex(clock=self.clock)
        self.num_refusals = 0
        self.knows_block = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def publish(self, worker_id: str, epoch: int, events: Sequence[BlockEvent], sequence: int) -> PublishResult:
        return self._noted(self.inner.publish(worker_id, epoch, events, sequence))

    def replace(self, worker_id: str, epoch: int, hashes: Iterable[bytes], sequence: int) -> PublishResult:
        return self._noted(self.inner.replace(worker_id, epoch, hashes, sequence))

    def leading_blocks(self, hashes: Sequence[bytes]) -> Mapping[str, int]:
        return self.inner.leading_blocks(hashes)

    def resumable_blocks(self, hashes: Sequence[bytes], leading: Mapping[str, int]) -> Mapping[str, int]:
        return self.inner.resumable_blocks(hashes, leading)

    def remove_worker(self, worker_id: str) -> None:
        self.inner.remove_worker(worker_id)

    def stats(self) -> LocalityStats:
        return self.inner.stats()

    def _noted(self, result: PublishResult) -> PublishResult:
        if result is PublishResult.STALE:
            self.num_refusals += 1
            self.clock.advance(SILENT_S / 3)
        if self.inner.leading_blocks([BLOCK]):
            self._loop.call_soon_threadsafe(self.knows_block.set)
        return result


def test_a_worker_whose_clock_was_set_back_reports_once_its_former_incarnation_is_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: its reports ended with the first refusal."""
    monkeypatch.setattr(feeds, "STALE_INTERVAL_S", 0.0)
    monkeypatch.setattr(feeds, "FLUSH_INTERVAL_S", 0.0)

    async def main() -> None:
        index = PatientIndex()
        index.inner.replace("d0", 2, [], 0)
        ours = Feeds([index], "d0", 1)
        ours.emit(BlockStored(BLOCK, None, 0))
        known, running = asyncio.create_task(index.knows_block.wait()), asyncio.create_task(ours.run())
        ended, _ = await asyncio.wait({known, running}, return_when=asyncio.FIRST_COMPLETED)
        running.cancel()
        assert ended == {known}
        assert index.num_refusals > 1
        assert index.leading_blocks([BLOCK]) == {"d0": 1}

    asyncio.run(main())
    assert len([record for record in caplog.records if "later incarnation" in record.message]) == 1
