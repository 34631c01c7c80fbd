"""The instrument is tested: bugs of one line, planted one at a time, are found by a seed that finds nothing without."""

import contextlib
import functools
import inspect
import logging
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from tandem.simulation.run import run_scenario
from tandem.simulation.scenario import scenario_of
from tests.simulation import mutations
from tests.simulation.mutations import MUTATIONS, Mutation
from tests.simulation.test_seeds import QUICK

OTHERS = range(40)
FOUND = [mutation for mutation in MUTATIONS if mutation.seed is not None]


class Planting:
    """Plants with `patch` and keeps TypeErrors of the planted lines themselves, and of calls that do not fit them.

    Regression: a planted method whose own call did not fit failed every request, which counted as found.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.mistakes: list[TypeError] = []

    def setattr(self, target: object, name: str, value: Any) -> None:
        if isinstance(value, property):
            assert value.fget is not None
            value = property(self._watched(value.fget))
        elif callable(value):
            value = self._watched(value)
        self._patch.setattr(target, name, value)

    def _watched(self, planted: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(planted)
        def call(*given: Any, **named: Any) -> Any:
            with self._noting():
                return planted(*given, **named)

        @functools.wraps(planted)
        async def wait(*given: Any, **named: Any) -> Any:
            with self._noting():
                return await planted(*given, **named)

        return wait if inspect.iscoroutinefunction(planted) else call

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except TypeError as error:
            if traceback.extract_tb(error.__traceback__)[-1].filename in (__file__, mutations.__file__):
                self.mistakes.append(error)
            raise


@contextlib.contextmanager
def planted(mutation: Mutation) -> Iterator[None]:
    """For the time of the block; fails if what was planted could not run."""
    with pytest.MonkeyPatch.context() as patch:
        planting = Planting(patch)
        mutation.plant(cast(pytest.MonkeyPatch, planting))
        yield
    assert planting.mistakes == []


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silences the processes' logs of the faults injected into them."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutation", FOUND, ids=lambda mutation: mutation.name)
def test_a_planted_bug_is_found(mutation: Mutation) -> None:
    """NOTE: any change of production code moves what a seed comes to, so others are tried where its own finds nothing;
    that they find nothing without the bug is tested with all seeds of `QUICK`.
    """
    assert mutation.seed is not None
    with planted(mutation):
        seeds = (mutation.seed, *OTHERS)
        finding = (seed for seed in seeds if run_scenario(scenario_of(seed), ends_early=True).violations)
        assert next(finding, None) is not None, f"found neither by seed {mutation.seed} nor below {OTHERS.stop}"


@pytest.mark.parametrize("seed", sorted({each.seed for each in FOUND if each.seed is not None} - set(QUICK)))
def test_without_it_the_seed_finds_nothing(seed: int) -> None:
    assert not run_scenario(scenario_of(seed)).violations


def test_what_is_not_found_has_a_reason() -> None:
    assert len(FOUND) >= 20
    assert all(bool(mutation.unfound) == (mutation.seed is None) for mutation in MUTATIONS)
    short = replace(scenario_of(0), asks=scenario_of(0).asks[:4])
    for mutation in MUTATIONS:
        if mutation.seed is None:
            with planted(mutation):
                run_scenario(short, ends_early=True)
