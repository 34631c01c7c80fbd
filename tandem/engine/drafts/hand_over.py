"""Hands the drafter's state of a request from the worker that computed its prompt to the one that decodes it.

On its way the state is bytes in pages of the model's pool, so that it is leased, read, compared and confirmed as blocks
of KV are. Neither side needs it: where there is no room, or the drafters differ, the decoding one starts cold.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from tandem.compute.ranked_pages import RankedPages
from tandem.engine.current_device import current_device
from tandem.engine.drafts.drafter import DraftState, StateCarrier
from tandem.kvcache.manager import HoldKind, KVCacheManager


@dataclass(frozen=True, slots=True)
class LentDraftState:
    """A `DraftState` of `num_bytes` in leased pages."""

    first: int
    num_rows: int
    num_bytes: int
    page_ids: tuple[int, ...]


class DraftHandOver:
    """Both sides of it, for one engine. Used by the thread that steps; `lent` by any.

    Args:
        carrier: the drafter.
        kv: accounts of the model's pool.
        pages: its memory.
        on_spent: told the seconds of each state that was put into pages, which steps do not count.
    """

    def __init__(
        self, carrier: StateCarrier, kv: KVCacheManager, pages: RankedPages, on_spent: Callable[[float], None]
    ) -> None:
        self.carrier = carrier
        self._kv = kv
        self._pages = pages
        self._on_spent = on_spent
        self._lent: dict[str, Future[LentDraftState | None]] = {}

    @property
    def fingerprint(self) -> str:
        """Equal where a state can be taken."""
        return self.carrier.fingerprint

    def lending(self, request_id: str, lease_id: str) -> Callable[[bool], None]:
        """Returns a function that copies the state of a request into pages under a lease. Its argument tells whether
        the engine still runs; if not, there is no state. It is to be called after the step that chose the request's
        last token and before the next one. From now on `lent` returns its result.
        """
        self._lent[request_id] = future = Future[LentDraftState | None]()
        return partial(self._lend, request_id, lease_id, future)

    def lent(self, request_id: str) -> Future[LentDraftState | None] | None:
        """Result of the function that `lending` returned, to be asked for once; it is None where the request has no
        state, or no pages were left. None: nothing was leased of the request.
        """
        return self._lent.pop(request_id, None)

    def take(self, request_id: str, lent: LentDraftState) -> None:
        """Have the drafter begin a request with the state in these pages of this worker. `forget` ends that."""
        data = self._pages.load(lent.page_ids, lent.num_bytes)
        self.carrier.take(request_id, DraftState(lent.first, lent.num_rows, data))

    def forget(self, request_id: str) -> None:
        """Drop what no step has used."""
        self._lent.pop(request_id, None)
        self.carrier.forget(request_id)

    def _lend(
        self, request_id: str, lease_id: str, future: Future[LentDraftState | None], is_engine_running: bool
    ) -> None:
        if not future.set_running_or_notify_cancel():
            return
        lent: LentDraftState | None = None
        try:
            if is_engine_running:
                began_s = time.perf_counter()
                with current_device(self._pages.pages.device):
                    lent = self._stored(request_id, lease_id)
                self._on_spent(time.perf_counter() - began_s)
        finally:  # NOTE: an error here ends the engine; who waits for the state must not wait for ever
            future.set_result(lent)

    def _stored(self, request_id: str, lease_id: str) -> LentDraftState | None:
        state = self.carrier.give(request_id)
        if state is None:
            return None
        num_bytes = state.data.numel()
        num_pages = -(-num_bytes // self._pages.bytes_per_page)
        if num_pages > self._kv.num_unpromised:
            return None
        page_ids = self._kv.borrow(lease_id, num_pages, HoldKind.LEASED)
        if not page_ids:  # NOTE: the reader has left; nobody would end a lease that began anew here
            return None
        self._pages.store(page_ids, state.data)
        return LentDraftState(state.first, state.num_rows, num_bytes, tuple(page_ids))
