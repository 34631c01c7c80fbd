"""Memory of the host tier (slots in host memory for pinned KV), and copies of blocks to it and back.

Invariant: every copy ends, with or without success, so no block stays reserved for one. Copies run on threads of their
own; the engine's thread never waits for one. The block accounting decides which pages may be accessed.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from tandem.core.clock import Clock
from tandem.core.errors import ConfigurationError, TransportError
from tandem.engine.engine import Engine
from tandem.kvcache.block_table import BlockRange
from tandem.kvcache.tiers import HostMove, HostRead
from tandem.transport.transfer import Transfer

logger = logging.getLogger(__name__)

Post = Callable[[Callable[[Engine], None]], None]


class HostPages:
    """Memory for as many pages as fit in `num_bytes`, each with the parts of all ranks; page-locked when the KV memory
    is on a GPU.

    Args:
        pages: the KV memory, uint8 [num_parts, num_pages, page_bytes]; one part for each rank, or one that all share.

    `page_bytes`: of one on all ranks, `num_slots`: how many there are.

    Raises:
        ConfigurationError: the machine has not that much memory.
    """

    def __init__(self, pages: torch.Tensor, num_bytes: int) -> None:
        num_parts, _, page_bytes = pages.shape
        self.page_bytes = num_parts * page_bytes
        self.num_slots = num_bytes // self.page_bytes
        self._arena = pages
        try:
            self._pages = torch.empty(
                self.num_slots, num_parts, page_bytes, dtype=torch.uint8, pin_memory=pages.is_cuda
            )
        except RuntimeError as error:
            raise ConfigurationError(f"host_kv_gib={num_bytes / 2**30:g} cannot be had: {error}; lower it") from error

    def store(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copies pages into slots, (page, slot) each; returns when they are stored. Any thread."""
        for page, slot in pairs:
            self._pages[slot].copy_(self._arena[:, page], non_blocking=True)
        self._wait()

    def load(self, reads: Iterable[HostRead]) -> None:
        """Copies slots, or other blocks, into blocks; returns when they are loaded. Any thread."""
        for read in reads:
            for page, place in zip(read.pages, read.slots or read.source_pages, strict=True):
                source = self._pages[place] if read.slots else self._arena[:, place]
                self._arena[:, page].copy_(source, non_blocking=True)
        self._wait()

    def _wait(self) -> None:
        """NOTE: copies are queued on the stream that computes the blocks, so they see complete ones."""
        if self._arena.is_cuda:
            torch.cuda.current_stream(self._arena.device).synchronize()


@dataclass(slots=True)
class Restore:
    """A copy of `reads` from the host tier; they are set before the transfer is over. May be empty."""

    transfer: Transfer
    reads: tuple[HostRead, ...] = ()


class HostCopier:
    """Copies pinned blocks to the host tier and back, one copy at a time in each direction.

    Args:
        post: runs a function on the engine's thread, between two steps.

    `has_moved`: whether the host tier has ever held anything.
    """

    def __init__(self, pages: HostPages, clock: Clock, post: Post) -> None:
        self._pages = pages
        self._clock = clock
        self._post = post
        self.has_moved = False
        self._out = ThreadPoolExecutor(1, thread_name_prefix="to-host")
        self._back = ThreadPoolExecutor(1, thread_name_prefix="from-host")

    def start_move(self, move: HostMove) -> None:
        """Starts a copy and returns at once. Call on the engine's thread."""
        self._out.submit(self._move, move)

    def restore(self, hashes: Sequence[bytes], groups: Sequence[BlockRange]) -> Restore:
        """Starts copying the blocks of a chain that the host tier has into reserved blocks; returns at once."""
        restore = Restore(Transfer(0, self._clock))
        self._post(lambda engine: self._start_restore(engine, restore, hashes, groups))
        return restore

    def close(self) -> None:
        """Waits for running copies. Call only when no more can be started."""
        self._out.shutdown(wait=True)
        self._back.shutdown(wait=True)

    def _move(self, move: HostMove) -> None:
        is_copied = False
        try:
            self._pages.store(move.pairs)
            is_copied = self.has_moved = True
        except RuntimeError as error:
            logger.error("the host tier is given up: %d blocks could not be copied to it: %s", len(move.pairs), error)
        finally:
            self._post(lambda engine: engine.kv.pinned.blocks.end_move(move.move_id, is_copied=is_copied))

    def _start_restore(
        self, engine: Engine, restore: Restore, hashes: Sequence[bytes], groups: Sequence[BlockRange]
    ) -> None:
        """NOTE: the slots are reserved from here until the copy releases them, so nothing may fail in between."""
        restore.reads = engine.kv.pinned.begin_restore(hashes, groups)
        self._back.submit(self._restore, restore)

    def _restore(self, restore: Restore) -> None:
        error: str | None = "it was not tried"
        try:
            self._pages.load(restore.reads)
            error = None
        except RuntimeError as failure:
            error = str(failure)
        finally:
            is_restored = error is None
            self._post(lambda engine: engine.kv.pinned.blocks.end_reads(restore.reads, is_restored=is_restored))
            if is_restored:
                restore.transfer.succeed()
            else:
                restore.transfer.fail(TransportError(f"blocks could not be copied from the host tier: {error}"))
