"""Transfer: state of one read of a peer's blocks, and whether its destination may still be written.

Invariant: `state` leaves PENDING once; `is_over` becomes true once, and from then on no byte of the destination is
written by this transfer. The owner of the destination blocks holds them until `is_over`, not only until the
transfer has failed. Only the transport that created a transfer may call `succeed`, `fail` and `settle`.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum

from tandem.core.clock import Clock
from tandem.core.errors import CapacityError, TransportError


class TransferState(StrEnum):
    """PENDING becomes DONE (every byte has arrived) or FAILED (none may be used)."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class Transfer:
    """Handle returned by `KVTransport.read`. Thread-safe.

    Args:
        num_bytes: total bytes of the read.
        clock: source of `started_s` and `finished_s`.
    """

    def __init__(self, num_bytes: int, clock: Clock) -> None:
        self.num_bytes = num_bytes
        self.started_s = clock.now_s()
        self.finished_s: float | None = None
        self.state = TransferState.PENDING
        self.error: TransportError | None = None
        self.is_over = False
        self._clock = clock
        self._changed = threading.Condition()
        self._done_callbacks: list[Callable[[Transfer], None]] = []
        self._over_callbacks: list[Callable[[Transfer], None]] = []

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is DONE or FAILED, at most `timeout_s`; returns whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self.state is not TransferState.PENDING, timeout_s)

    def add_done_callback(self, callback: "Callable[[Transfer], None]") -> None:
        """Call `callback` when DONE or FAILED: from the transport's thread, or at once if it is. It must not raise."""
        with self._changed:
            if self.state is TransferState.PENDING:
                self._done_callbacks.append(callback)
                return
        callback(self)

    def add_over_callback(self, callback: "Callable[[Transfer], None]") -> None:
        """Call `callback` when `is_over`, in the same way; this is where the hold on the destination blocks ends."""
        with self._changed:
            if not self.is_over:
                self._over_callbacks.append(callback)
                return
        callback(self)

    def succeed(self) -> None:
        """Mark as DONE: every byte is in place."""
        self._become(TransferState.DONE, None, is_over=True)

    def fail(self, error: TransportError, *, is_over: bool = True) -> None:
        """Mark as FAILED. `is_over=False` if the destination may still be written. Repeated calls are ignored."""
        self._become(TransferState.FAILED, error, is_over=is_over)

    def settle(self) -> None:
        """Mark a failed transfer as over: it can no longer write."""
        assert self.state is not TransferState.PENDING
        self._become(self.state, self.error, is_over=True)

    @staticmethod
    def begun(begins: "Iterable[Callable[[], Transfer]]", clock: Clock) -> "Transfer":
        """Begins several reads, in order, as one transfer. If one is refused, the transfer has failed, and is over when
        those before it are: they may still write.

        Raises:
            TransportError, CapacityError: the first was refused, so that nothing writes.
        """
        parts: list[Transfer] = []
        for begin in begins:
            try:
                parts.append(begin())
            except (TransportError, CapacityError) as error:
                if not parts:
                    raise
                refused = Transfer(0, clock)
                refused.fail(error if isinstance(error, TransportError) else TransportError(str(error)))
                parts.append(refused)
                break
        return parts[0] if len(parts) == 1 else Transfer.joined(parts, clock)

    @staticmethod
    def joined(parts: "Sequence[Transfer]", clock: Clock) -> "Transfer":
        """One transfer for several: DONE when all are, FAILED with the first that fails, over when all are over."""
        whole = Transfer(sum(part.num_bytes for part in parts), clock)
        lock, left = threading.Lock(), {"pending": len(parts), "callbacks": 2 * len(parts)}

        def is_last(kind: str) -> bool:
            with lock:
                left[kind] -= 1
                return left[kind] == 0

        def ended(part: Transfer) -> None:
            if part.error is not None:
                whole.fail(part.error, is_over=False)
            if is_last("pending") and whole.error is None:
                whole.succeed()
            called(part)

        def called(_: Transfer) -> None:
            """NOTE: a part that ends while it is added here may be over before its thread tells that it has ended."""
            if is_last("callbacks"):
                whole.settle()

        for part in parts:
            part.add_done_callback(ended)
            part.add_over_callback(called)
        return whole

    def _become(self, state: TransferState, error: TransportError | None, *, is_over: bool) -> None:
        callbacks: list[Callable[[Transfer], None]] = []
        with self._changed:
            if self.state is TransferState.PENDING:
                self.state, self.error, self.finished_s = state, error, self._clock.now_s()
                callbacks, self._done_callbacks = self._done_callbacks, []
            if is_over and not self.is_over:
                self.is_over = True
                callbacks, self._over_callbacks = callbacks + self._over_callbacks, []
            self._changed.notify_all()
        for callback in callbacks:
            callback(self)
