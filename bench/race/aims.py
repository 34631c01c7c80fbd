"""Aims of the race, each with the figure that was reached. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from bench.race.metrics import HEADLINES, METRICS
from bench.race.summary import AGGREGATED, BEST, DRAFTS, PEER_SPLIT, SPLIT, Summary, is_peer

FLOOR = "floor"


@dataclass(frozen=True, slots=True)
class Aim:
    """`system` is at least `least` times as good as `other` in that figure. `other`: a system, BEST or FLOOR."""

    workload: str
    name: str
    system: str
    other: str
    least: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result for an aim. `reached` None: it could not be measured."""

    aim: Aim
    reached: float | None

    @property
    def is_met(self) -> bool:
        return self.reached is not None and self.reached >= self.aim.least

    def line(self) -> str:
        aim = self.aim
        reached = "not measured" if self.reached is None else f"{self.reached:.2f}"
        word = "met" if self.is_met else "**missed**" if self.reached is not None else "open"
        return f"| {aim.workload} | {aim.name} | {aim.system} / {aim.other} | {aim.least:g} | {reached} | {word} |"


AIMS = (
    Aim("single", "TPOT p50", AGGREGATED, BEST, 1.1),
    Aim("single", "TPOT p50", AGGREGATED, FLOOR, 0.8),
    *(Aim(workload, "prompt rate", AGGREGATED, BEST, 1.1) for workload in ("prefill-1", "prefill-8")),
    *(Aim(workload, "prompt rate", AGGREGATED, FLOOR, 0.8) for workload in ("prefill-1", "prefill-8")),
    *(Aim(workload, "output rate", AGGREGATED, BEST, 1.2) for workload in ("batch", "shared", "turns")),
    Aim("burst", "ITL p99", SPLIT, AGGREGATED, 3.0),
    *(Aim("batch", "peak memory", system, FLOOR, 1.0) for system in (AGGREGATED, SPLIT)),
    Aim("single", "TPOT p50", SPLIT, PEER_SPLIT, 3.0),
    *(Aim(workload, "prompt rate", SPLIT, PEER_SPLIT, 3.0) for workload in ("prefill-1", "prefill-8")),
    *(Aim(workload, "output rate", SPLIT, PEER_SPLIT, 3.0) for workload in ("batch", "shared", "turns")),
    Aim("burst", "ITL p99", SPLIT, PEER_SPLIT, 3.0),
    *(Aim(workload, "output rate", SPLIT, AGGREGATED, 0.9) for workload in ("single", "batch", "shared", "turns")),
    *(Aim(workload, "prompt rate", SPLIT, AGGREGATED, 0.9) for workload in ("prefill-1", "prefill-8")),
    *(Aim(workload, name, DRAFTS, AGGREGATED, 0.97) for workload, name in HEADLINES.items()),
)


def verdicts(summary: Summary) -> Iterator[Verdict]:
    """On every aim whose workload and systems were raced, also without success."""
    for aim in AIMS:
        if aim.workload in summary.workloads and _is_raced(summary, aim):
            yield Verdict(aim, _reached(summary, aim))


def _is_raced(summary: Summary, aim: Aim) -> bool:
    others = {FLOOR} | ({BEST} if any(is_peer(system) for system in summary.asked) else set())
    return aim.system in summary.asked and aim.other in summary.asked | others


def _reached(summary: Summary, aim: Aim) -> float | None:
    if aim.other == FLOOR:
        cell = summary.cells.get((aim.workload, aim.system, aim.name))
        return None if cell is None else cell.share(METRICS[aim.name])
    other = summary.best_peer(aim.workload, aim.name) if aim.other == BEST else aim.other
    return summary.ratio(aim.workload, aim.name, aim.system, other)
