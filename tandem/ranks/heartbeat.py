"""Finds ranks whose heartbeats have stopped, and loading that has. Reads no clock: times are arguments."""

from collections.abc import Sequence

BEAT_S = 0.25  # between two heartbeats
SILENCE_S = 1.5  # after which a rank counts as lost: it is found within two seconds
START_SILENCE_S = 120.0  # same until all ranks are ready: imports come before the first, and loading delays some
STALL_S = 1800.0  # of loading without processor time; compiling a kernel elsewhere may take 20 minutes
_PROGRESS_S = 0.01  # processor time that counts as progress: more than two clocks differ by


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


class LoadProgress:
    """Finds that loading has stalled: a rank that reads slowly uses some processor time, one that hangs uses none.

    NOTE: without it the leader would wait for ever, since heartbeats come from a thread that loads nothing.
    """

    def __init__(self, now_s: float) -> None:
        self._cpu_s, self._grew_s = 0.0, now_s

    def has_stalled(self, cpu_s: float, now_s: float) -> bool:
        """Whether `cpu_s`, the processor time of the threads that load, has not grown for `STALL_S`. Call it
        regularly.
        """
        if cpu_s - self._cpu_s >= _PROGRESS_S:
            self._cpu_s, self._grew_s = cpu_s, now_s
        return now_s - self._grew_s >= STALL_S
