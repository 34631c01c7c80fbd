"""The instrument is tested: bugs of one line, planted one at a time, are found by a seed that finds nothing without."""

import logging
from collections.abc import Iterator

import pytest

from tandem.simulation.run import run_scenario
from tandem.simulation.scenario import scenario_of
from tests.simulation.mutations import MUTATIONS, Mutation

FOUND = [mutation for mutation in MUTATIONS if mutation.seed is not None]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What processes log of the faults done to them is of no interest."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("mutation", FOUND, ids=lambda mutation: mutation.name)
def test_a_planted_bug_is_found(mutation: Mutation) -> None:
    assert mutation.seed is not None
    with pytest.MonkeyPatch.context() as patch:
        mutation.plant(patch)
        report = run_scenario(scenario_of(mutation.seed))
    assert report.violations, f"not found in seed {mutation.seed} any more; look for another one"


@pytest.mark.parametrize("seed", sorted({mutation.seed for mutation in FOUND if mutation.seed is not None}))
def test_without_it_the_seed_finds_nothing(seed: int) -> None:
    assert not run_scenario(scenario_of(seed)).violations


def test_what_is_not_found_has_a_reason() -> None:
    assert len(FOUND) >= 20
    assert all(bool(mutation.unfound) == (mutation.seed is None) for mutation in MUTATIONS)
