"""Stages of a request are timed by a clock that never goes back, and have the engine's figures."""

import time

import pytest

from tandem.core.clock import ManualClock
from tandem.core.draft_counts import DraftCounts
from tandem.core.output import RequestMetrics, RequestOutput
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


def decode_attributes(drafts: DraftCounts | None, num_tokens: int, num_ranks: int = 1) -> dict[str, str | int | float]:
    watch = Stopwatch("d0", "prefill", ManualClock(), num_ranks)
    for token_id in range(num_tokens):
        watch.token(RequestOutput("r", 0, (token_id,), ""))
    metrics = RequestMetrics(
        arrival_s=0.0,
        first_scheduled_s=None,
        first_token_s=None,
        last_token_s=None,
        num_prompt_tokens=3,
        num_output_tokens=num_tokens,
        num_cached_tokens=0,
        num_preemptions=0,
        drafts=drafts,
    )
    (decode,) = (
        stage for stage in watch.all_stages(RequestOutput("r", 0, (), "", metrics=metrics)) if stage.name == "decode"
    )
    return dict(decode.attributes)


def test_a_decode_with_drafts_tells_of_them() -> None:
    """Of 13 tokens the first is the prompt's; 12 came in 4 steps."""
    assert decode_attributes(DraftCounts(4, (4, 4, 2), (4, 3, 1), 0.25), 13) == {
        "num_tokens": 13,
        "num_preemptions": 0,
        "num_steps": 4,
        "num_drafted": 10,
        "num_accepted": 8,
        "accepted_by_position": "1: 4 of 4, 2: 3 of 4, 3: 1 of 2",
        "tokens_per_step": 3.0,
        "time_saved_s": 0.25,
    }


def test_a_decode_without_drafts_does_not_name_them() -> None:
    assert decode_attributes(None, 13) == {"num_tokens": 13, "num_preemptions": 0}


def test_stages_of_several_ranks_say_how_many() -> None:
    assert decode_attributes(None, 3, num_ranks=4)["num_ranks"] == 4
    assert "num_ranks" not in decode_attributes(None, 3)
