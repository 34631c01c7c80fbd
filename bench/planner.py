"""Planners over a recorded hour: what users get and what it costs, by policy and by how long a replica takes to start.

Every policy sees the same fleet in virtual time (`tandem.fleet_simulation`): the router's real decisions, workers as
fast as their roofline. Copies of the trace are laid over each other to fill several replicas; each has its own
prefixes, and all arrivals are spread inside the trace's ticks. The best fixed pool is known in hindsight: the smallest
that reaches the target. Elastic policies start from it, so none is charged for a cold start of the whole fleet.
"""

import argparse
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bench.report import Report, Row
from bench.scaling_rules import FixedPools, QueueRule, UtilisationRule
from bench.two_loop_rule import TwoLoopRule
from tandem.architecture.catalogue import find_cost
from tandem.fleet_simulation.cluster import Cluster
from tandem.fleet_simulation.result import PoolSizes, SimulationResult
from tandem.fleet_simulation.setting import SimulationSetting
from tandem.planning.capacity import DecodeCapacity, OfferedLoad, PrefillCapacity
from tandem.planning.hardware import ACCELERATORS
from tandem.planning.observation import ScalingPolicy
from tandem.planning.planner import SloPlanner
from tandem.planning.planner_settings import PlannerConfig
from tandem.planning.pools import Prospect
from tandem.planning.roofline import Roofline
from tandem.routing.admission import AdmissionLimits
from tandem.workload.arrivals import spread_in_ticks
from tandem.workload.slo import Slo, SloReport
from tandem.workload.trace import MOONCAKE_BLOCK_SIZE, TraceRequest, read_trace

FIGURES = Path(__file__).parent.parent / "docs" / "figures"
STARTUPS_S = (0.0, 60.0, 90.0, 120.0)
_MOST = 24
_REPORT_S = 1.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A trace, what serves it, and what is asked of it. `target`: attainment that a fixed pool must reach.

    tide: 0 leaves the trace as it is; 0.75 keeps between a quarter and all of its requests, in waves of half an hour.
    """

    trace: Path
    copies: int
    shape: str
    hardware: str
    slo: Slo
    target: float
    tide: float = 0.0

    @property
    def name(self) -> str:
        return self.trace.stem + (f", tide {self.tide:g}" if self.tide else "")

    @property
    def planner(self) -> PlannerConfig:
        return PlannerConfig(
            ttft_ms=1000 * self.slo.ttft_s,
            tpot_ms=1000 * self.slo.tpot_s,
            share=self.target,
            max_prefill=_MOST,
            max_decode=_MOST,
        )

    def setting(self, pools: tuple[int, int], startup_s: float, interval_s: float) -> SimulationSetting:
        accelerator = next(found for found in ACCELERATORS if found.name == self.hardware)
        worker = Roofline(find_cost(self.shape), accelerator)
        block_size = MOONCAKE_BLOCK_SIZE if self.trace.suffix == ".jsonl" else 16
        return SimulationSetting(
            prefill=worker.speed,
            decode=worker.speed,
            prefill_kv_tokens=worker.kv_tokens,
            decode_kv_tokens=worker.kv_tokens,
            block_size=block_size,
            block_bytes=math.ceil(block_size * worker.model.kv_bytes_per_token),
            num_prefill=pools[0],
            num_decode=pools[1],
            startup_s=startup_s,
            interval_s=interval_s,
            report_s=_REPORT_S,
            limits=AdmissionLimits(fresh_s=1.5 * _REPORT_S, dead_s=4 * _REPORT_S),
        )

    def requests(self) -> list[TraceRequest]:
        """All copies in order of arrival."""
        recorded = list(read_trace(self.trace))
        found = [request for number in range(self.copies) for request in self._copy(recorded, number)]
        return sorted(found, key=lambda request: request.arrival_s)

    def guess(self) -> tuple[int, int]:
        """Pools that the mean demand needs; the search begins there."""
        requests = self.requests()
        num_prompt = sum(request.num_prompt_tokens for request in requests) / len(requests)
        load = OfferedLoad(
            requests_per_s=len(requests) / requests[-1].arrival_s,
            num_prompt_tokens=num_prompt,
            num_missing_tokens=0.7 * num_prompt if requests[0].block_ids else num_prompt,
            num_output_tokens=sum(request.num_output_tokens for request in requests) / len(requests),
        )
        worker = self.setting((1, 1), 0.0, 1.0)
        prospect = Prospect(
            self.planner,
            load,
            PrefillCapacity(worker.prefill.prefill, 1.0, 0.95),
            DecodeCapacity(worker.decode.decode, worker.decode_kv_tokens, worker.max_running, 1.0, 0.95),
        )
        return prospect.prefill_need(), prospect.decode_need()

    def _copy(self, recorded: Iterable[TraceRequest], number: int) -> Iterable[TraceRequest]:
        source, offset = random.Random(number), number << 40
        for request in spread_in_ticks(recorded, source):
            if source.random() < self._kept(request.arrival_s):
                yield replace(request, block_ids=tuple(offset + block_id for block_id in request.block_ids))

    def _kept(self, at_s: float) -> float:
        return 1 - self.tide * (1 + math.cos(2 * math.pi * at_s / 1800)) / 2


@dataclass(frozen=True, slots=True)
class Contestant:
    """A policy and how often it looks."""

    name: str
    interval_s: float
    make: Callable[[PlannerConfig], ScalingPolicy]


CONTESTANTS = (
    Contestant("HPA, 70 % use", 15.0, UtilisationRule),
    Contestant("KEDA, 5 waiting", 15.0, QueueRule),
    Contestant("Dynamo's two loops", 5.0, TwoLoopRule),
    Contestant("Tandem", 10.0, SloPlanner),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One policy's hour."""

    system: str
    startup_s: float
    report: SloReport
    accelerator_hours: float
    num_changes: int
    sizes: Sequence[PoolSizes]


def fixed_run(scenario: Scenario, pools: tuple[int, int]) -> Run:
    simulated = Cluster(scenario.setting(pools, 0.0, 60.0), FixedPools(*pools)).run(scenario.requests())
    return _run(f"fixed {pools[0]} + {pools[1]}", 0.0, simulated, scenario.slo)


def elastic_run(scenario: Scenario, pools: tuple[int, int], number: int, startup_s: float) -> Run:
    contestant = CONTESTANTS[number]
    setting = scenario.setting(pools, startup_s, contestant.interval_s)
    settings = replace(scenario.planner, interval_s=contestant.interval_s)
    simulated = Cluster(setting, contestant.make(settings)).run(scenario.requests())
    return _run(contestant.name, startup_s, simulated, scenario.slo)


def _run(system: str, startup_s: float, simulated: SimulationResult, slo: Slo) -> Run:
    report = simulated.report(slo)
    return Run(system, startup_s, report, simulated.accelerator_hours, simulated.num_changes, simulated.sizes)


def fixed_pools(scenario: Scenario, jobs: ProcessPoolExecutor) -> list[Run]:
    """The smallest that reaches the target comes last; all that were tried are kept.

    The pools hardly touch each other: the least of each with plenty of the other, then up from there by one.
    """
    tried: dict[tuple[int, int], Run] = {}

    def run(*sizes: tuple[int, int]) -> Sequence[Run]:
        new = [pools for pools in sizes if pools not in tried]
        tried.update(zip(new, jobs.map(partial(fixed_run, scenario), new), strict=True))
        return [tried[pools] for pools in sizes]

    guess = scenario.guess()
    plenty = guess[1] + 3
    least_prefill = _least(guess[0], lambda num: run((num, plenty))[0].report.attainment >= scenario.target)
    least_decode = _least(guess[1], lambda num: run((least_prefill + 1, num))[0].report.attainment >= scenario.target)
    total = least_prefill + least_decode
    while True:
        pairs = [(total - num_decode, num_decode) for num_decode in range(least_decode, total - least_prefill + 1)]
        best = max(zip(run(*pairs), pairs, strict=True), key=lambda found: found[0].report.attainment)
        if best[0].report.attainment >= scenario.target:
            return [*(found for pools, found in tried.items() if pools != best[1]), best[0]]
        total += 1


def given_pools(scenario: Scenario, jobs: ProcessPoolExecutor, sizes: Sequence[int]) -> list[Run]:
    """The best of these comes last: the cheapest that reaches the target, or the one that comes closest."""
    found = list(jobs.map(partial(fixed_run, scenario), zip(sizes[::2], sizes[1::2], strict=True)))

    def rank(run: Run) -> tuple[float, float]:
        reached = min(run.report.attainment, scenario.target)
        return reached, -run.accelerator_hours if reached == scenario.target else 0.0

    return sorted(found, key=rank)


def _least(guess: int, suffices: Callable[[int], bool]) -> int:
    """Step by step from a guess: most guesses are one or two off."""
    while guess < _MOST and not suffices(guess):
        guess += 1
    while guess > 1 and suffices(guess - 1):
        guess -= 1
    return guess


def rows(scenario: Scenario, runs: Iterable[Run], best_hours: float) -> list[Row]:
    """Six figures a run."""
    found = []
    for run in runs:
        assert run.report.ttft_s is not None
        workload = f"{scenario.name}, {run.startup_s:.0f} s start-up"
        figures: Mapping[str, tuple[float, str]] = {
            "SLO attainment": (run.report.attainment, ""),
            "rejected": (run.report.num_rejected / run.report.num_requests, ""),
            "mean TTFT": (run.report.ttft_s.mean, "s"),
            "p99 TTFT": (run.report.ttft_s.p99, "s"),
            "accelerator-hours": (run.accelerator_hours, "h"),
            "hours over the best fixed pool's": (run.accelerator_hours / best_hours, ""),
            "changes of size": (run.num_changes, ""),
        }
        found += [Row(workload, run.system, metric, value, unit) for metric, (value, unit) in figures.items()]
    return found


def draw(scenario: Scenario, runs: Sequence[Run], best: Run, path: Path) -> None:
    """Ready replicas over time: one column a policy, one row a pool, one line a start-up time."""
    from matplotlib import pyplot

    names = list(dict.fromkeys(run.system for run in runs))
    figure, axes = pyplot.subplots(2, len(names), figsize=(3.6 * len(names), 5.2), sharex=True, sharey="row")
    for column, name in enumerate(names):
        for run in [run for run in runs if run.system == name]:
            minutes = [size.at_s / 60 for size in run.sizes]
            label = f"{run.startup_s:.0f} s: {run.report.attainment:.1%}, {run.accelerator_hours:.1f} h"
            axes[0][column].step(minutes, [size.prefill_ready for size in run.sizes], label=label, linewidth=1)
            axes[1][column].step(minutes, [size.decode_ready for size in run.sizes], linewidth=1)
        axes[0][column].axhline(best.sizes[0].prefill_ready, color="grey", linestyle=":", linewidth=1)
        axes[1][column].axhline(best.sizes[0].decode_ready, color="grey", linestyle=":", linewidth=1)
        axes[0][column].set_title(name, fontsize=10)
        axes[0][column].legend(fontsize=7, title="start-up: attainment, accelerator-hours", title_fontsize=7)
        axes[1][column].set_xlabel("minutes")
    axes[0][0].set_ylabel("prefill replicas ready")
    axes[1][0].set_ylabel("decode replicas ready")
    best_label = f"dotted: {best.system}, {best.report.attainment:.1%} at {best.accelerator_hours:.1f} h"
    figure.suptitle(f"{scenario.name} x {scenario.copies}; {best_label}", fontsize=11)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    arguments = _arguments()
    scenario = _scenario(arguments)
    with ProcessPoolExecutor(arguments.jobs) as jobs:
        fixed = given_pools(scenario, jobs, arguments.pools) if arguments.pools else fixed_pools(scenario, jobs)
        best = fixed[-1]
        pools = (best.sizes[0].prefill_ready, best.sizes[0].decode_ready)
        chosen = [number for number, found in enumerate(CONTESTANTS) if found.name.split(",")[0] in arguments.policies]
        pairs = [(number, startup_s) for number in chosen for startup_s in arguments.startups]
        waiting = [jobs.submit(elastic_run, scenario, pools, number, startup_s) for number, startup_s in pairs]
        elastic = [found.result() for found in waiting]
    config = {key: str(value.name if isinstance(value, Path) else value) for key, value in vars(arguments).items()}
    config |= {"slo_ttft_s": str(scenario.slo.ttft_s), "slo_tpot_s": str(scenario.slo.tpot_s)}
    runs = [*fixed, *elastic]
    name = f"planner-{scenario.trace.stem}" + ("-tide" if scenario.tide else "")
    report = Report(name, config, rows(scenario, runs, best.accelerator_hours), notes=_NOTES)
    report.print()
    if arguments.figure and elastic:
        draw(scenario, elastic, best, FIGURES / f"{name}.svg")
    if arguments.save:
        print(report.save())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake .jsonl or Azure .csv")
    parser.add_argument("--copies", type=int, default=4, help="of the trace, laid over each other")
    parser.add_argument("--tide", type=float, default=0.0, help="depth of half-hour waves of demand, 0 to 1")
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--ttft-s", type=float, default=8.0)
    parser.add_argument("--tpot-s", type=float, default=0.05)
    parser.add_argument("--target", type=float, default=0.98, help="attainment that the best fixed pool must reach")
    parser.add_argument("--pools", type=int, nargs="*", help="P D P D ...: try these fixed pools, search for no others")
    parser.add_argument("--startups", type=float, nargs="*", default=list(STARTUPS_S))
    parser.add_argument("--policies", nargs="*", default=[found.name.split(",")[0] for found in CONTESTANTS])
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--figure", action="store_true", help="draw the pools over time into docs/figures")
    return parser.parse_args()


def _scenario(arguments: argparse.Namespace) -> Scenario:
    return Scenario(
        trace=arguments.trace,
        copies=arguments.copies,
        shape=arguments.shape,
        hardware=arguments.hardware,
        slo=Slo(arguments.ttft_s, arguments.tpot_s),
        target=arguments.target,
        tide=arguments.tide,
    )


_NOTES = (
    "Simulated, not measured: workers as fast as their roofline at typical efficiency, exactly known to every policy.",
    "The router's knowledge is up to a second old; what it sent meanwhile it counts itself.",
    "Left out: decode workers' prefix caches, contention of links, failures, moves of running requests.",
    "Accelerator-hours count starting and draining replicas. Attainment counts rejected requests as missed.",
)


if __name__ == "__main__":
    main()
