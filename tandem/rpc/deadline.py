"""The deadline of a call, its handshake included."""

import asyncio


class Deadline:
    """`timeout_s`: from now on; None = as long as it takes."""

    __slots__ = ("_ends_at_s", "timeout_s")

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self._ends_at_s = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s

    def left_s(self) -> float | None:
        """None = as long as it takes."""
        return None if self._ends_at_s is None else max(0.0, self._ends_at_s - asyncio.get_running_loop().time())
