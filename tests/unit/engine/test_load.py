"""The log of steps that routers' estimates are made from."""

from dataclasses import replace

import pytest

from tandem.engine.load import MAX_STEP_STATS, StepLog, StepStats

STEP = StepStats(
    num_prompts=1, num_prompt_tokens=8, num_prompt_pairs=32.0, num_decodes=0, num_context_tokens=0, duration_s=2.0
)


def test_time_behind_a_step_is_the_last_ones() -> None:
    log = StepLog()
    log.note(STEP)
    log.note(STEP)
    log.add(0.5)
    assert log.take() == [STEP, replace(STEP, duration_s=2.5)]
    assert log.take() == []


def test_time_behind_a_step_that_was_taken_is_nobodys() -> None:
    log = StepLog()
    log.add(0.5)
    log.note(STEP)
    assert log.take() == [STEP]


def test_accepted_drafts_make_a_token_cheaper() -> None:
    """Routers estimate a decode's pace from it."""
    step = replace(STEP, num_prompts=0, num_prompt_tokens=0, num_prompt_pairs=0.0, num_decodes=2, duration_s=0.08)
    assert step.token_s == 0.08
    assert replace(step, num_drafts=14, num_accepted=6).token_s == pytest.approx(0.02)


def test_old_steps_are_forgotten() -> None:
    log = StepLog()
    for _ in range(MAX_STEP_STATS + 3):
        log.note(STEP)
    assert len(log.take()) == MAX_STEP_STATS
