"""The instrument is tested: bugs of one line, planted one at a time, are found within a few seeds.

What it does not find, and why, is in the decision page of 2026-11-25.
"""

import logging
from collections.abc import Iterator

import pytest

from tandem.simulation.scenario import scenario_of
from tandem.simulation.world import run_scenario
from tests.simulation.mutations import MUTATIONS, Mutation

QUICK = [mutation for mutation in MUTATIONS if mutation.seed is not None]
MAX_SEEDS = 300


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def violations_of(mutation: Mutation, seed: int) -> list[str]:
    """What does not hold in a seed with the bug planted."""
    with pytest.MonkeyPatch.context() as patch:
        mutation.plant(patch)
        return run_scenario(scenario_of(seed)).violations


@pytest.mark.parametrize("mutation", QUICK, ids=lambda mutation: mutation.name)
def test_a_planted_bug_is_found(mutation: Mutation) -> None:
    assert mutation.seed is not None
    assert violations_of(mutation, mutation.seed), f"{mutation.name}: not found in seed {mutation.seed} any more"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "mutation", [mutation for mutation in MUTATIONS if mutation.is_rare], ids=lambda mutation: mutation.name
)
def test_a_rare_bug_is_found_within_many_seeds(mutation: Mutation) -> None:
    assert any(violations_of(mutation, seed) for seed in range(MAX_SEEDS)), f"{mutation.name}: not found"
