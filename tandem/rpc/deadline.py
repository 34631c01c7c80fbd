"""Deadline of one call; the time of its handshake counts too."""

import asyncio


class Deadline:
    """Deadline `timeout_s` seconds from now; None = none."""

    __slots__ = ("_ends_at_s", "timeout_s")

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self._ends_at_s = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s

    def left_s(self) -> float | None:
        """Seconds left, 0 once it has passed; None = no deadline."""
        return None if self._ends_at_s is None else max(0.0, self._ends_at_s - asyncio.get_running_loop().time())
