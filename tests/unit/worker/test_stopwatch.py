"""Stages of a request are timed by a clock that never goes back."""

import time

import pytest

from tandem.core.clock import ManualClock
from tandem.core.output import RequestOutput
from tandem.core.timeline import Stage
from tandem.worker.stopwatch import Stopwatch


def test_a_wall_clock_set_back_spoils_no_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a metric's sum went down, and `tandem trace` refused the whole request."""
    wall_s = 1e9
    monkeypatch.setattr(time, "time", lambda: wall_s)
    clock = ManualClock(7.0)
    watch = Stopwatch("d0", "prefill", clock)
    clock.advance(1.0)
    wall_s -= 3600.0
    watch.chunk(16)
    clock.advance(1.0)
    first = RequestOutput("r", 0, (1,), "a")
    assert watch.token(first) is None
    clock.advance(0.5)
    wall_s -= 3600.0
    assert watch.token(first) == pytest.approx(0.5)
    assert watch.all_stages(first) == (
        Stage("prefill chunk", "d0", 1e9, 1.0, {"num_tokens": 16}),
        Stage("first token", "d0", 1e9 + 2.0, 0.0),
    )
