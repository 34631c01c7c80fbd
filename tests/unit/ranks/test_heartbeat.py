"""Heartbeats: a rank that stands still is found, and none that runs."""

import threading
from typing import Any, cast

import pytest

from tandem.ranks.heartbeat import BEAT_S, SILENCE_S, STALL_S, Heartbeats, LoadProgress
from tandem.ranks.rank import _beat


def test_the_rank_that_stands_still_is_found_in_time() -> None:
    """Within the silence and one more question; the leader's own count means nothing."""
    beats, now_s = [0, 5, 7, 9], 10.0
    heartbeats = Heartbeats(beats, now_s)
    silent = None
    while silent is None:
        now_s += BEAT_S
        beats[1] += 1
        beats[3] += 1
        silent = heartbeats.silent_rank(beats, now_s)
    assert silent == 2
    assert SILENCE_S <= now_s - 10.0 <= SILENCE_S + BEAT_S


def test_it_is_known_how_long_each_rank_has_not_been_heard() -> None:
    heartbeats = Heartbeats([0, 1, 1], 0.0)
    heartbeats.silent_rank([0, 2, 1], 0.25)
    assert heartbeats.silent_s(0.5) == (0.0, 0.25, 0.5)


def test_who_stood_still_itself_accuses_nobody() -> None:
    """As where the whole machine was stopped, and the ranks have not run yet."""
    heartbeats = Heartbeats([0, 1, 1], 0.0)
    assert heartbeats.silent_rank([0, 1, 1], 100.0) is None
    assert heartbeats.silent_rank([0, 1, 2], 100.5) is None
    assert heartbeats.silent_rank([0, 1, 3], 101.1) is None
    assert heartbeats.silent_rank([0, 1, 4], 101.6) == 1


def test_the_limit_may_be_longer() -> None:
    heartbeats = Heartbeats([0, 0], 0.0, 60.0)
    times = [number * BEAT_S for number in range(1, 300)]
    assert next(now_s for now_s in times if heartbeats.silent_rank([0, 0], now_s) == 1) == 60.0


def test_loading_that_takes_no_processor_time_has_stalled() -> None:
    progress = LoadProgress(10.0)
    assert not progress.has_stalled(3.0, 20.0)
    assert not progress.has_stalled(3.001, 20.0 + STALL_S - 1)
    assert progress.has_stalled(3.002, 20.0 + STALL_S), "what two clocks differ by is none"
    assert not progress.has_stalled(3.1, 20.0 + STALL_S + 1)
    assert not progress.has_stalled(3.1, 20.0 + 2 * STALL_S)


class EndedError(Exception):
    """Ends the loop of heartbeats, which has no end of its own."""


class HalfHours:
    """Stands for the module `time`: every turn of the loop takes half an hour, and other threads `busy_s` of it."""

    def __init__(self, busy_s: float, num_turns: int) -> None:
        self._busy_s, self._num_turns, self._turn = busy_s, num_turns, 0

    def monotonic(self) -> float:
        return self._turn * STALL_S

    def process_time(self) -> float:
        return self._turn * self._busy_s

    def thread_time(self) -> float:
        return 0.0

    def sleep(self, _: float) -> None:
        self._turn += 1
        if self._turn == self._num_turns:
            raise EndedError


@pytest.mark.parametrize(("is_loading", "busy_s", "wanted"), [(True, 0.0, 1), (True, 1.0, 4), (False, 0.0, 4)], ids=str)
def test_a_rank_whose_loading_has_stalled_sends_no_heartbeats(
    monkeypatch: pytest.MonkeyPatch, is_loading: bool, busy_s: float, wanted: int
) -> None:
    """Regression: the leader waited for it for ever."""
    monkeypatch.setattr("tandem.ranks.rank.time", HalfHours(busy_s, num_turns=4))
    loading, beats = threading.Event(), list[None]()
    if is_loading:
        loading.set()

    class Links:
        def beat(self) -> None:
            beats.append(None)

    with pytest.raises(EndedError):
        _beat(cast(Any, Links()), loading)
    assert len(beats) == wanted
