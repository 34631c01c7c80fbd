"""Finds ranks whose heartbeats have stopped. Reads no clock: the time is an argument."""

from collections.abc import Sequence

BEAT_S = 0.25  # between two heartbeats
SILENCE_S = 1.5  # after which a rank counts as lost: it is found within two seconds
START_SILENCE_S = 120.0  # same until all ranks are ready: imports come before the first, and loading delays some


class Heartbeats:
    """Last heartbeat of each rank but the leader, which calls `silent_rank` regularly with present numbers.

    Args:
        beats: number of heartbeats so far, by rank.
        limit_s: silence after which a rank counts as lost.
    """

    def __init__(self, beats: Sequence[int], now_s: float, limit_s: float = SILENCE_S) -> None:
        self.limit_s = limit_s
        self._beats = list(beats)
        self._heard_s = [now_s] * len(beats)
        self._asked_s = now_s

    def silent_s(self, now_s: float) -> tuple[float, ...]:
        """Seconds since each rank's last heartbeat; 0 for the leader."""
        return 0.0, *(max(0.0, now_s - heard_s) for heard_s in self._heard_s[1:])

    def silent_rank(self, beats: Sequence[int], now_s: float) -> int | None:
        """The first rank that has been silent for `limit_s`; None = no rank has.

        NOTE: if the leader itself has stood still meanwhile, so may all others have: their silence starts anew.
        """
        stood_still = now_s - self._asked_s > SILENCE_S / 2
        self._asked_s = now_s
        for rank in range(1, len(beats)):
            if stood_still or beats[rank] != self._beats[rank]:
                self._beats[rank], self._heard_s[rank] = beats[rank], now_s
            elif now_s - self._heard_s[rank] >= self.limit_s:
                return rank
        return None
