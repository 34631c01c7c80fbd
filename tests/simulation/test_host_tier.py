"""Kept prompts that move to a worker's host tier while others need its pool, and are read from there.

A scenario written by hand: few seeds have a prompt that is moved and asked for again.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tandem.simulation.run import Report, run_scenario
from tandem.simulation.scenario import ClientRequest
from tests.simulation.mutations import moved_blocks_are_not_copied, restored_blocks_are_not_copied
from tests.simulation.test_lost_workers import BEGIN_S, SCENARIO

NUM_BETWEEN = 6  # of 19 blocks each, in a pool of 34


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silences the processes' logs."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def asked(number: int, at_s: float, prompt: tuple[int, ...]) -> ClientRequest:
    return replace(SCENARIO.asks[0], number=number, at_s=at_s, prompt=prompt, max_tokens=2)


def prompt_of(number: int, num_tokens: int) -> tuple[int, ...]:
    return tuple((37 * number + (number + 3) * index) % 256 for index in range(num_tokens))


def run() -> Report:
    kept = replace(asked(0, BEGIN_S, prompt_of(0, 100)), pin_s=8.0)
    between = [asked(n, BEGIN_S + 0.5 + 0.4 * n, prompt_of(n, 150)) for n in range(1, NUM_BETWEEN + 1)]
    following = asked(NUM_BETWEEN + 1, BEGIN_S + 4.0, (*kept.prompt, 1, 2, 3))
    asks = (kept, *between, following)
    return run_scenario(
        replace(SCENARIO, decodes=("decode-0",), asks=asks, num_blocks=34, num_host_slots=24, step_s=0.01)
    )


def test_a_prompt_that_was_moved_is_read_from_the_host_tier() -> None:
    report = run()
    assert report.violations == []
    assert [outcome.ending for outcome in report.outcomes] == ["whole"] * (NUM_BETWEEN + 2)


@pytest.mark.parametrize("plant", [moved_blocks_are_not_copied, restored_blocks_are_not_copied])
def test_a_planted_bug_shows_as_wrong_tokens(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert any(f"alice.{NUM_BETWEEN + 1} got " in violation for violation in run().violations)
