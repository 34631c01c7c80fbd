"""Timeout of calls to a peer that may be slow, as on a machine with too few cores."""

_SILENT_SHARE = 0.9  # of the timeout: NOTE: clocks round, and gRPC ends a call some milliseconds early


class Patience:
    """Timeout of the next call: twice as long after each call that was not answered, else twice the last answer's time.

    Invariant: a peer that answers within `most_s` is heard in the end, however short `least_s` is; once answers are
    quick, a call waits no longer than `least_s`.

    Args:
        least_s, most_s: bounds of the timeout. The first call has `least_s`.
    """

    def __init__(self, least_s: float, most_s: float) -> None:
        self._least_s = least_s
        self._most_s = max(least_s, most_s)
        self.timeout_s = least_s

    def note_answer(self, took_s: float) -> None:
        """Records an answer, a refusal included."""
        self.timeout_s = min(max(self._least_s, 2 * took_s), self._most_s)

    def note_silence(self, waited_s: float) -> None:
        """Records a call that failed. NOTE: only silence counts, not a connection that was refused at once; and of
        calls that ran side by side only one.
        """
        if waited_s >= _SILENT_SHARE * self.timeout_s:
            self.timeout_s = min(2 * self.timeout_s, self._most_s)
