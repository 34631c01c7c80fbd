"""Heartbeats: a rank that stands still is found, and none that runs."""

from tandem.ranks.heartbeat import BEAT_S, SILENCE_S, Heartbeats


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
