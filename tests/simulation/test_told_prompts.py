"""Prompts of which only what is new is sent, to a worker that has forgotten their beginning.

A scenario written by hand: few prompts of a seed are forgotten and then named.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tandem.simulation.run import Report, run_scenario
from tandem.simulation.scenario import ClientRequest
from tests.simulation.mutations import forgotten_prompts_count_as_empty
from tests.simulation.test_lost_workers import SCENARIO

NUM_BETWEEN = 12  # more than a worker remembers, and from another gateway than knows the first


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silences the processes' logs."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def prompt_of(number: int) -> tuple[int, ...]:
    return tuple((37 * number + (number + 3) * index) % 256 for index in range(100))


def asked(number: int, at_s: float, gateway: str, prompt: tuple[int, ...]) -> ClientRequest:
    return replace(SCENARIO.asks[0], number=number, at_s=at_s, gateway=gateway, prompt=prompt, max_tokens=2)


def run() -> Report:
    first = asked(0, 4.0, "gateway-0", prompt_of(0))
    between = [asked(n, 5.0 + 0.2 * n, "gateway-1", prompt_of(n)) for n in range(1, NUM_BETWEEN + 1)]
    following = asked(NUM_BETWEEN + 1, 9.0, "gateway-0", (*first.prompt, *range(20)))
    return run_scenario(
        replace(
            SCENARIO,
            decodes=("decode-0",),
            gateways=("gateway-0", "gateway-1"),
            asks=(first, *between, following),
            sends_prompt_suffixes=True,
        )
    )


def test_a_prompt_that_was_forgotten_is_sent_whole() -> None:
    report = run()
    assert report.violations == []
    assert [outcome.ending for outcome in report.outcomes] == ["whole"] * (NUM_BETWEEN + 2)


def test_a_planted_bug_shows_as_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten_prompts_count_as_empty(monkeypatch)
    (violation,) = run().violations
    assert f"alice.{NUM_BETWEEN + 1} got " in violation
