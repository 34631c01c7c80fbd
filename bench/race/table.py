"""The race as Markdown: one table a shape, then its aims, then whatever failed. Pure."""

from collections.abc import Iterator, Mapping

from bench.race.aims import verdicts
from bench.race.metrics import METRICS
from bench.race.summary import AGGREGATED, PEER_SPLIT, SPLIT, Summary, bits_of

WEAK_CORES = 0.3
_LEGEND = (
    "Medians over rounds; in brackets the share of the floor's speed; * = more than 0.3 cores were busy with "
    "something else. Ratios are above 1 where the first is better."
)


def markdown(summary: Summary, titles: Mapping[str, str], absent: Mapping[str, str]) -> str:
    """Of one shape. `titles`: of workloads; `absent`: why a system took no part."""
    lines = [f"### {summary.shape}", "", _LEGEND, "", *_table(summary, titles), "", *_aims(summary)]
    lines += [f"- {name} took no part: {reason}" for name, reason in absent.items()]
    lines += [f"- {line}" for line in (*summary.failures(), *summary.circumstances())]
    return "\n".join(lines) + "\n"


def _table(summary: Summary, titles: Mapping[str, str]) -> Iterator[str]:
    systems = summary.systems
    ratios = () if summary.coded else ("tandem / best peer", "1P1D / vLLM 1P1D", "1P1D / tandem")
    head = ["workload", "figure", *systems, *ratios]
    yield _line(head)
    yield _line(["---"] * len(head))
    for workload in summary.workloads:
        title = titles.get(workload, workload)
        for name, metric in METRICS.items():
            cells = [_cell(summary, workload, system, name) for system in systems]
            if any(cells):
                shown = [cell or "-" for cell in cells]
                further = [] if summary.coded else _ratios(summary, workload, name)
                yield _line([title, f"{name}, {metric.unit}", *shown, *further])
                title = ""


def _cell(summary: Summary, workload: str, system: str, name: str) -> str:
    cell = summary.cells.get((workload, system, name))
    if cell is None:
        return ""
    share = cell.share(METRICS[name])
    mark = "*" if cell.foreign_cores > WEAK_CORES else ""
    shown = f"{_number(cell.value)}{mark}" + ("" if share is None else f" ({share:.0%})")
    return shown + (_beside_same_bits(summary, workload, system, name) if system in summary.coded else "")


def _beside_same_bits(summary: Summary, workload: str, system: str, name: str) -> str:
    """Factor by which `system` is better than the best peer with as many bits, as text; empty = there is none."""
    best = summary.best_peer(workload, name, bits_of(system))
    ratio = summary.ratio(workload, name, system, best)
    return "" if ratio is None else f", {ratio:.2f} x {best}"


def _ratios(summary: Summary, workload: str, name: str) -> list[str]:
    best = summary.best_peer(workload, name)
    pairs = ((AGGREGATED, best), (SPLIT, PEER_SPLIT), (SPLIT, AGGREGATED))
    ratios = [summary.ratio(workload, name, system, other) for system, other in pairs]
    shown = ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
    return [f"{shown[0]} ({best})" if shown[0] else "", *shown[1:]]


def _aims(summary: Summary) -> Iterator[str]:
    lines = [verdict.line() for verdict in verdicts(summary)]
    if lines:
        yield _line(["workload", "figure", "aim", "at least", "reached", ""])
        yield _line(["---"] * 6)
        yield from lines
        yield ""


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float) -> str:
    """Three digits or the whole part."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
