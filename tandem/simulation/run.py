"""Runs one scenario and reports violated invariants.

Invariant: the result is a function of the scenario. Everything a run creates is released when it ends.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import psutil

from tandem.simulation.client import ClientOutcome
from tandem.simulation.faults import begin_fault
from tandem.simulation.invariants import check_end, check_tokens
from tandem.simulation.kubernetes import ScaleWrite
from tandem.simulation.loop import DeadlockError, EndlessError
from tandem.simulation.scenario import Scenario
from tandem.simulation.world import World


@dataclass(slots=True)
class Report:
    """Result of a run. `violations`: messages on violated invariants; empty = success. `writes`: those of planners."""

    scenario: Scenario
    violations: list[str] = field(default_factory=list)
    outcomes: list[ClientOutcome] = field(default_factory=list)
    writes: list[ScaleWrite] = field(default_factory=list)
    digest: str = ""
    lines: list[str] | None = None
    num_events: int = 0
    virtual_s: float = 0.0


def run_scenario(scenario: Scenario, *, keep_trace: bool = False, ends_early: bool = False) -> Report:
    """Run a scenario and check the invariants.

    Args:
        keep_trace: for `Report.lines`.
        ends_early: stops at the first violation; the order of events until then is the same.
    """
    was_enabled, had_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.disable()  # NOTE: what it frees, and when, must not change the order of events
    gc.freeze()  # NOTE: so that looking for what this run leaves does not pass all that was imported
    world = World(scenario, begin_fault, keep_trace=keep_trace)
    report = Report(scenario)
    if ends_early:
        world.on_outcome = partial(check_tokens, world)
        world.loop.on_bug = world.on_violation = world.loop.stop
    try:
        with _on_one_core():
            if _run(world):
                check_end(world)
    except (DeadlockError, EndlessError) as error:
        world.violate(str(error))
    finally:
        report.violations = [*world.violations, *(f"a bug: {bug}" for bug in world.loop.bugs)]
        report.outcomes = [exchange.outcome for exchange in world.exchanges]
        report.writes = [] if world.scaling is None else world.scaling.writes
        report.digest, report.lines = world.trace.digest, world.trace.lines
        report.num_events, report.virtual_s = world.loop.num_events, world.loop.time()
        loop = world.loop
        world.close()
        del world
        loop.tear_down()
        if not had_frozen:  # NOTE: otherwise the caller's objects would be looked through again, too
            gc.unfreeze()
        if was_enabled:
            gc.enable()
    return report


@contextmanager
def _on_one_core() -> Iterator[None]:
    """Confines this thread, and those it starts, to the core that it runs on.

    NOTE: the event loop and the fibers' threads run in turns. Waking a thread on another core takes longer than most
    turns.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {psutil.Process().cpu_num()})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _run(world: World) -> bool:
    """Runs the scenario; returns False if it was stopped before its end."""
    running = world.loop.create_task(world.run())
    running.add_done_callback(lambda _: world.loop.stop())
    world.loop.run_forever()
    if running.done():
        running.result()
    return running.done()
