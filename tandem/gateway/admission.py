"""Limit on concurrent requests. Invariant: never more than the limit; further requests are refused."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tandem.core.errors import CapacityError, UnavailableError


class Admission:
    """Counts the requests being served. Owned by one event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._is_closed = False
        self.num_open = 0

    @contextmanager
    def place(self) -> Iterator[Callable[[], None]]:
        """Counts one request as being served until the block ends or the yielded function is called, whichever comes
        first.

        Raises:
            CapacityError: all places are occupied.
            UnavailableError: this gateway is stopping.
        """
        if self._is_closed:
            raise UnavailableError("this gateway is stopping; another one serves", 1.0)
        if self.num_open >= self._limit:
            raise CapacityError(f"this gateway serves {self._limit} requests already; try again", 1.0)
        self.num_open += 1
        held = [True]

        def free() -> None:
            if held:
                held.clear()
                self.num_open -= 1

        try:
            yield free
        finally:
            free()

    def close(self) -> None:
        """Refuses all further requests."""
        self._is_closed = True

    @property
    def is_closed(self) -> bool:
        return self._is_closed
