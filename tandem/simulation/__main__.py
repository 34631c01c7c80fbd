"""`python -m tandem.simulation`: runs seeds, prints violated invariants, and shrinks a failing seed.

Prints a table, then one JSON line. The exit code is 1 when a seed failed.
"""

import argparse
import json
import logging
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Sequence

from tandem.simulation.run import run_scenario
from tandem.simulation.scenario import Scenario, scenario_of
from tandem.simulation.seeds import SeedResult, run_seeds
from tandem.simulation.shrink import shrunk


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tandem.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count(), help="that run them")
    parser.add_argument("--shrink", action="store_true", help="make the first failing seed smaller, and show it")
    options = parser.parse_args(argv)
    started_s = time.monotonic()
    results = _run_all(range(options.first, options.first + options.seeds), options.processes)
    _show(results, time.monotonic() - started_s)
    failed = [result for result in results if result.violations]
    if failed and options.shrink:
        _show_smaller(failed[0].seed)
    return 1 if failed else 0


def _run_all(seeds: Sequence[int], num_processes: int) -> list[SeedResult]:
    results = []
    for result in run_seeds(seeds, num_processes):
        results.append(result)
        if result.violations:
            _say(f"seed {result.seed} FAILED ({result.digest})")
            for violation in result.violations:
                _say(f"    {violation}")
    return results


def _show(results: Sequence[SeedResult], wall_s: float) -> None:
    faults = Counter(fault for result in results for fault in result.faults)
    endings = Counter(ending for result in results for ending in result.endings)
    virtual_s = sum(result.virtual_s for result in results)
    figures = {
        "seeds": len(results),
        "failed": sum(bool(result.violations) for result in results),
        "events": sum(result.num_events for result in results),
        "faults": sum(faults.values()),
        "requests": sum(endings.values()),
        "virtual_hours": round(virtual_s / 3600, 3),
        "wall_s": round(wall_s, 1),
        "seeds_per_min": round(60 * len(results) / wall_s, 1),
        "virtual_hours_per_min": round(virtual_s / 60 / wall_s, 3),
    }
    for name, value in figures.items():
        _say(f"{name.replace('_', ' '):>24}  {value}")
    _say(f"{'by fault':>24}  {', '.join(f'{name} {count}' for name, count in sorted(faults.items()))}")
    _say(f"{'by ending':>24}  {', '.join(f'{name} {count}' for name, count in sorted(endings.items()))}")
    _say(json.dumps({**figures, "by_fault": dict(faults), "by_ending": dict(endings)}, sort_keys=True))


def _show_smaller(seed: int) -> None:
    def fails(scenario: Scenario) -> bool:
        return bool(run_scenario(scenario).violations)

    logging.disable(logging.CRITICAL)
    scenario = shrunk(scenario_of(seed), fails)
    _say(f"seed {seed}, made smaller: {', '.join(scenario.names)}; {scenario.num_blocks} blocks")
    for item in (*scenario.faults, *scenario.asks):
        _say(f"    {item}")
    for violation in run_scenario(scenario).violations:
        _say(f"  {violation}")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
