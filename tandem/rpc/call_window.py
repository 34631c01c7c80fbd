"""Replay protection of a session: accepts each call number once, in any order of arrival."""

SIZE = 1024  # numbers; a call that more than that many later ones have overtaken is refused
_MASK = (1 << SIZE) - 1


class CallWindow:
    """Remembers the last `SIZE` call numbers, one bit each; older numbers count as seen."""

    __slots__ = ("_highest", "_seen")

    def __init__(self) -> None:
        self._highest = 0
        self._seen = 0

    def accept(self, number: int) -> bool:
        """Accepts `number` (above zero) if it is new; returns whether it was."""
        ahead = number - self._highest
        if ahead > 0:
            self._seen = (self._seen << ahead | 1) & _MASK if ahead < SIZE else 1
            self._highest = number
            return True
        if -ahead >= SIZE or self._seen & 1 << -ahead:  # NOTE: in this order, or a caller chooses the shift's size
            return False
        self._seen |= 1 << -ahead
        return True
