"""Copies between the arena and host memory: they arrive whole, they always end, and what fails is said."""

import queue
from collections.abc import Callable, Iterable

import pytest
import torch

from tandem.compute.arena import Arena
from tandem.core.clock import ManualClock
from tandem.engine.engine import Engine
from tandem.kvcache.tiers import HostMove, HostRead
from tandem.transport.transfer import TransferState
from tandem.worker.host_tier import HostCopier, HostPages, Restore
from tests.helpers.layouts import layout_of

NUM_BLOCKS = 6


@pytest.fixture
def arena() -> Arena:
    arena = Arena(layout_of(None), NUM_BLOCKS, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    arena.pages.copy_(torch.randint(0, 256, arena.pages.shape, generator=generator, dtype=torch.uint8))
    return arena


@pytest.mark.parametrize("num_parts", [1, 2])
def test_pages_come_back_bit_by_bit_and_touch_no_others(arena: Arena, num_parts: int) -> None:
    """Of all ranks."""
    own = torch.stack([arena.pages.roll(part, 1) for part in range(num_parts)])
    before = own.clone()
    pages = HostPages(own, 3 * num_parts * arena.layout.page_bytes + 1)
    assert pages.num_slots == 3
    pages.store([(1, 2), (4, 0)])
    pages.load([HostRead(0, 0, (5, 3), (2, 0)), HostRead(0, 2, (2,), (), 4, source_pages=(4,))])
    assert torch.equal(own[:, [5, 3, 2]], before[:, [1, 4, 4]])
    assert torch.equal(own[:, [0, 1, 4]], before[:, [0, 1, 4]])


class Failing(HostPages):
    """Host pages of a GPU that is lost."""

    def store(self, pairs: Iterable[tuple[int, int]]) -> None:
        raise RuntimeError("the device is gone")

    def load(self, reads: Iterable[HostRead]) -> None:
        raise RuntimeError("the device is gone")


Action = Callable[[Engine], None]


def test_a_copy_that_fails_ends_too(arena: Arena) -> None:
    posted: queue.SimpleQueue[Action] = queue.SimpleQueue()
    copier = HostCopier(Failing(arena.pages.unsqueeze(0), arena.layout.page_bytes), ManualClock(), posted.put)
    copier.start_move(HostMove(1, ((1, 0),)))
    posted.get(timeout=5)
    assert not copier.has_moved
    restore = copier.restore([], ())
    assert isinstance(restore, Restore)
    copier._back.submit(copier._restore, restore)
    assert restore.transfer.wait(5)
    assert restore.transfer.state is TransferState.FAILED
    assert "the device is gone" in str(restore.transfer.error)
    copier.close()
    assert posted.qsize() == 2, "the engine was not told to begin and to let go"
