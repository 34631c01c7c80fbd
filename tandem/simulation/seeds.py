"""Runs the scenarios of many seeds in several processes. A seed's result does not depend on the process that runs
it.
"""

import logging
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from tandem.simulation.run import run_scenario
from tandem.simulation.scenario import scenario_of


@dataclass(frozen=True, slots=True)
class SeedResult:
    """Result of one seed. `endings`: how each request ended. `digest`: of all events, equal in every run of the
    seed.
    """

    seed: int
    num_events: int
    virtual_s: float
    faults: tuple[str, ...]
    endings: tuple[str, ...]
    violations: tuple[str, ...]
    digest: str


def run_seed(seed: int) -> SeedResult:
    """Run a seed in this process, whose logs are switched off from now on."""
    logging.disable(logging.CRITICAL)
    report = run_scenario(scenario_of(seed))
    return SeedResult(
        seed,
        report.num_events,
        report.virtual_s,
        tuple(str(fault.kind) for fault in report.scenario.faults),
        tuple(outcome.ending for outcome in report.outcomes),
        tuple(report.violations),
        report.digest,
    )


def run_seeds(seeds: Sequence[int], num_processes: int) -> Iterator[SeedResult]:
    """Yields the results in the order of the seeds."""
    with ProcessPoolExecutor(num_processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(run_seed, seeds, chunksize=4)
