"""Speculation over steps of given durations: how many guesses it has checked."""

import pytest

from tandem.core.sampling_params import SamplingParams
from tandem.engine.drafts.known import KnowingDrafter
from tandem.engine.drafts.speculation import Speculation
from tandem.scheduler.output import NewRequest, SampledToken, ScheduledRequest, SchedulerOutput

ANSWER = [index % 90 for index in range(1000)]


def lengths_of(acceptance: float, row_s: float, num_steps: int = 60) -> list[int]:
    """Drafts checked in each step of one request; a step takes a second and `row_s` for each row."""
    speculation = Speculation(KnowingDrafter({(1, 2): ANSWER}, 100, acceptance))
    new: tuple[NewRequest, ...] = (NewRequest("r", [1, 2], [], SamplingParams(), 0, frozenset(), b""),)
    drafts: list[int] = []
    lengths, position = [], 0
    for _ in range(num_steps):
        lengths.append(len(drafts))
        tokens = [1, *drafts]
        step = SchedulerOutput(new, (ScheduledRequest("r", 0, tokens, True, num_drafts=len(drafts)),), ())
        speculation.begin(step)
        new = ()
        num_right = next((i for i, token_id in enumerate(drafts) if ANSWER[position + i] != token_id), len(drafts))
        chosen = ANSWER[position : position + num_right + 1]
        position += len(chosen)
        sampled = {"r": [SampledToken(token_id) for token_id in chosen]}
        drafts = list(speculation.drafts(step, sampled, 1.0 + row_s * len(tokens)).get("r", ()))
    return lengths


@pytest.mark.parametrize(("acceptance", "row_s"), [(0.0, 0.05), (0.5, 10.0)], ids=["never right", "dear"])
def test_what_does_not_pay_is_soon_left(acceptance: float, row_s: float) -> None:
    lengths = lengths_of(acceptance, row_s)
    assert sum(lengths) <= 20
    assert not any(lengths[20:])


def test_what_pays_is_checked_as_long_as_allowed() -> None:
    assert set(lengths_of(1.0, 0.05)[10:]) == {7}


def test_less_sure_guesses_are_shorter() -> None:
    lengths = lengths_of(0.6, 0.1)[20:]
    assert 1 <= sum(lengths) / len(lengths) <= 5


def test_a_drafter_that_has_become_right_is_noticed_unchecked() -> None:
    """Its guesses are compared with what was chosen, though none was computed."""
    speculation = Speculation(drafter := KnowingDrafter({(1, 2): ANSWER}, 100, 0.0))
    new: tuple[NewRequest, ...] = (NewRequest("r", [1, 2], [], SamplingParams(), 0, frozenset(), b""),)
    step = SchedulerOutput(new, (ScheduledRequest("r", 0, [1], True),), ())
    speculation.begin(step)
    found = []
    for position in range(60):
        drafter.acceptance = float(position >= 30)
        drafts = speculation.drafts(step, {"r": [SampledToken(ANSWER[position])]}, 1.0)
        found.append(len(drafts.get("r", ())))
    assert found[29] == 0
    assert found[59] > 0


def test_released_requests_are_forgotten() -> None:
    speculation = Speculation(KnowingDrafter({(1, 2): ANSWER}, 100))
    new: tuple[NewRequest, ...] = (NewRequest("r", [1, 2], [], SamplingParams(), 0, frozenset(), b""),)
    step = SchedulerOutput(new, (ScheduledRequest("r", 0, [1, 2], True),), ())
    speculation.begin(step)
    speculation.begin(SchedulerOutput((), (), ("r",)))
    assert not speculation.drafts(step, {"r": [SampledToken(0)]}, 1.0)
