"""Medians and ratios of a race: from runs to rows of a report and to the table people read. Pure.

Ratios are above 1 where the first of the two is better. Each is the median over rounds of that round's own ratio, since
what disturbs the machine in one round disturbs neighbours alike.
"""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bench.race.metrics import HEADLINES, METRICS, Metric
from bench.race.runs import Run
from bench.report import Row

AGGREGATED, SPLIT, PEER_SPLIT = "tandem", "tandem-1p1d", "vllm-1p1d"
DRAFTS, PEER_DRAFTS = "tandem-drafts", "vllm-drafts"
EIGHT_BITS = ("int8", "q8_0")
BEST = "best peer"


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure of one system on one workload: by round."""

    by_turn: Mapping[int, float]
    floors: Mapping[int, float]
    foreign_cores: float

    @property
    def value(self) -> float:
        return statistics.median(self.by_turn.values())

    @property
    def floor(self) -> float | None:
        return statistics.median(self.floors.values()) if self.floors else None

    def share(self, metric: Metric) -> float | None:
        """Of the floor's speed, round by round."""
        shares = [metric.better_by(self.by_turn[turn], floor) for turn, floor in self.floors.items()]
        return statistics.median(shares) if shares else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Factor by which `system` is better than `other`, a system's name."""

    system: str
    other: str
    ratio: float


@dataclass
class Summary:
    """Of one shape."""

    shape: str
    cells: dict[tuple[str, str, str], Cell] = field(default_factory=dict)
    failed: list[Run] = field(default_factory=list)
    measured: list[Run] = field(default_factory=list)

    @classmethod
    def of(cls, shape: str, runs: Iterable[Run]) -> "Summary":
        """Of the runs of that shape."""
        found = cls(shape)
        grouped: dict[tuple[str, str], list[Run]] = {}
        for run in runs:
            if run.slot.shape != shape:
                continue
            if run.measured is None:
                found.failed.append(run)
            else:
                found.measured.append(run)
                grouped.setdefault((run.slot.workload, run.slot.system), []).append(run)
        for (workload, system), group in grouped.items():
            for name in METRICS:
                cell = _cell(group, name)
                if cell is not None:
                    found.cells[workload, system, name] = cell
        return found

    @property
    def systems(self) -> list[str]:
        return list(dict.fromkeys(system for _, system, _ in self.cells))

    @property
    def workloads(self) -> list[str]:
        return list(dict.fromkeys(workload for workload, _, _ in self.cells))

    @property
    def asked(self) -> set[str]:
        """The systems that were to be measured, also those that failed."""
        return {*self.systems, *(run.slot.system for run in self.failed)}

    def failures(self) -> list[str]:
        """A line for each thing that went wrong, which may have cost several workloads."""
        lost: dict[tuple[str, int, str], list[str]] = {}
        for run in self.failed:
            lost.setdefault((run.slot.system, run.slot.turn, run.failure), []).append(run.slot.workload)
        return [
            f"{self.shape} · {system}, round {turn + 1}, lost {', '.join(workloads)}: {' '.join(failure.split())}"
            for (system, turn, failure), workloads in lost.items()
        ]

    def circumstances(self) -> list[str]:
        """Under which all of this was measured, and how busy the client itself was."""
        runs = [run.measured for run in self.measured if run.measured is not None]
        if not runs:
            return []
        commits = sorted({run.git_sha[:8] for run in self.measured if run.git_sha})
        return [
            f"{self.shape}: the client used at most {max(one.client_cores for one in runs):.2f} cores",
            f"{self.shape}: {_spread([one.read_bandwidth / 1e9 for one in runs])} GB/s read, "
            f"{_spread([one.matmul_rate / 1e9 for one in runs])} GFLOP/s of products",
            f"{self.shape}: measured at {', '.join(commits) or 'no commit'}, "
            f"{min(run.date for run in self.measured)} to {max(run.date for run in self.measured)}",
        ]

    def best_peer(self, workload: str, name: str, bits: int = 16) -> str | None:
        """The peer with the best median among those whose weights have so many bits and that draft nothing."""
        there = [
            system
            for system in self.systems
            if is_peer(system)
            and system != PEER_DRAFTS
            and bits_of(system) == bits
            and (workload, system, name) in self.cells
        ]
        if not there:
            return None
        sign = -1 if METRICS[name].is_rate else 1
        return min(there, key=lambda system: sign * self.cells[workload, system, name].value)

    def ratio(self, workload: str, name: str, system: str, other: str | None) -> float | None:
        """Factor by which `system` is better; None when either is missing."""
        ours, theirs = self.cells.get((workload, system, name)), self.cells.get((workload, other or "", name))
        if ours is None or theirs is None:
            return None
        better_by = METRICS[name].better_by
        shared = ours.by_turn.keys() & theirs.by_turn.keys()
        pairs = [(ours.by_turn[turn], theirs.by_turn[turn]) for turn in shared] or [(ours.value, theirs.value)]
        ratios = [better_by(first, second) for first, second in pairs if first and second]
        return statistics.median(ratios) if ratios else None

    def comparisons(self, workload: str, name: str) -> Iterator[Comparison]:
        """Ours with the best peer, ours split and with drafts with theirs, and our ways with each other."""
        best = self.best_peer(workload, name)
        split = (SPLIT, best), (SPLIT, PEER_SPLIT), (SPLIT, AGGREGATED)
        for system, other in ((AGGREGATED, best), *split, (DRAFTS, PEER_DRAFTS), (DRAFTS, AGGREGATED)):
            ratio = self.ratio(workload, name, system, other)
            if ratio is not None and other is not None:
                yield Comparison(system, other, ratio)
        for system in self.coded:
            other = self.best_peer(workload, name, bits_of(system))
            ratio = self.ratio(workload, name, system, other)
            if ratio is not None and other is not None:
                yield Comparison(system, other, ratio)

    @property
    def coded(self) -> list[str]:
        """Ours whose weights are codes."""
        return [system for system in self.systems if not is_peer(system) and bits_of(system) < bits_of(AGGREGATED)]

    def rows(self) -> Iterator[Row]:
        """For the report: every figure, then every ratio."""
        for (workload, system, name), cell in self.cells.items():
            metric = METRICS[name]
            yield Row(
                f"{self.shape} · {workload}",
                system,
                name,
                cell.value,
                metric.unit,
                cell.floor,
                cell.share(metric),
                tuple(cell.by_turn.values()),
                cell.foreign_cores,
            )
        for workload, name in dict.fromkeys((workload, name) for workload, _, name in self.cells):
            for one in self.comparisons(workload, name):
                where = f"{self.shape} · {workload}"
                yield Row(where, one.system, f"{name}, times better than {one.other}", one.ratio, "x")

    def headlines(self) -> Iterator[tuple[str, str]]:
        """Each workload with the figure that it is about."""
        return ((workload, HEADLINES[workload]) for workload in self.workloads if workload in HEADLINES)


def is_peer(system: str) -> bool:
    """Whether another system made it."""
    return system.partition("-")[0] != AGGREGATED


def bits_of(system: str) -> int:
    """Bits of a weight, as the name says: "tandem-int8-a8" has 8, "llama-q4_k_m" 4, "vllm" 16."""
    _, _, name = system.partition("-")
    if any(name.startswith(word) for word in EIGHT_BITS):
        return 8
    return 4 if "4" in name else 16


def _cell(group: Sequence[Run], name: str) -> Cell | None:
    measured = {run.slot.turn: run.measured for run in group if run.measured is not None}
    by_turn = {turn: one.figures[name] for turn, one in measured.items() if name in one.figures}
    floors = {turn: one.floors[name] for turn, one in measured.items() if name in one.floors and turn in by_turn}
    foreign = statistics.median(one.foreign_cores for one in measured.values())
    return Cell(by_turn, floors, foreign) if by_turn else None


def _spread(values: Sequence[float]) -> str:
    return f"{min(values):.0f} to {max(values):.0f}"
