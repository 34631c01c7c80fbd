"""Clock interface: code that decides or measures takes a `Clock`, so that tests and the simulator control time."""

from typing import Protocol

from tandem.core.machine import monotonic_s


class Clock(Protocol):
    """A source of seconds that never goes backwards."""

    def now_s(self) -> float: ...


class SystemClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        return monotonic_s()


class ManualClock:
    """Clock that advances only on request."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"cannot advance by {seconds} s: a clock never goes backwards")
        self._now_s += seconds
