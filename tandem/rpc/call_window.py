"""Window of the call numbers of a session: each number is accepted once, in any order of arrival."""

SIZE = 1024  # calls; one that is overtaken by more than that is refused
_MASK = (1 << SIZE) - 1


class CallWindow:
    """Remembers the last `SIZE` numbers, one bit each; what is older counts as seen."""

    __slots__ = ("_highest", "_seen")

    def __init__(self) -> None:
        self._highest = 0
        self._seen = 0

    def accept(self, number: int) -> bool:
        """Whether `number` (above zero) is new; it is not accepted again."""
        ahead = number - self._highest
        if ahead > 0:
            self._seen = (self._seen << ahead | 1) & _MASK if ahead < SIZE else 1
            self._highest = number
            return True
        if -ahead >= SIZE or self._seen & 1 << -ahead:  # NOTE: in this order, or a caller chooses the shift's size
            return False
        self._seen |= 1 << -ahead
        return True
