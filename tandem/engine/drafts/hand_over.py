"""Hands the drafter's state of a request from the worker that computed its prompt to the one that decodes it.

The *drafter* guesses tokens, and may have a state of its own. On its way the state is bytes in pages of the model's KV
pool, so it is leased, read, verified and confirmed like KV blocks. It is optional: if no pages are free, or the
drafters differ, the decoding worker's drafter starts without it.
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
    """A `DraftState` of `num_bytes` bytes, stored in leased pages: `num_rows` rows, the first of position `first`."""

    first: int
    num_rows: int
    num_bytes: int
    page_ids: tuple[int, ...]


class DraftHandOver:
    """Both ends of the hand-over, for one engine: `lending`, then `lent` where the prompt is computed; `take` where the
    request is decoded. Used by the engine's thread; `lent` by any thread.

    Args:
        carrier: the drafter.
        kv: accounts of the model's pool.
        pages: its memory.
        on_spent: called with the seconds that copying a state took, which no step's time includes.
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
        """Equal at two workers if one can use the other's state."""
        return self.carrier.fingerprint

    def lending(self, request_id: str, lease_id: str) -> Callable[[bool], None]:
        """Returns a function that copies a request's state into pages under a lease, given whether the engine still
        runs; `lent` returns its result.

        Call it after the step that chose the request's last token and before the next step. If the engine has stopped,
        there is no state.
        """
        self._lent[request_id] = future = Future[LentDraftState | None]()
        return partial(self._lend, request_id, lease_id, future)

    def lent(self, request_id: str) -> Future[LentDraftState | None] | None:
        """Future result of the function that `lending` returned; can be taken once. The result is None if the request
        has no state or no pages were left. Returns None if `lending` was not called for this request.
        """
        return self._lent.pop(request_id, None)

    def take(self, request_id: str, lent: LentDraftState) -> None:
        """Have the drafter begin a request with the state in these pages of this worker. `forget` undoes it."""
        data = self._pages.load(lent.page_ids, lent.num_bytes)
        self.carrier.take(request_id, DraftState(lent.first, lent.num_rows, data))

    def forget(self, request_id: str) -> None:
        """Drop the request's states that were lent but not taken, or taken but not used by a step."""
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
