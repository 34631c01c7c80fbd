"""Pictures of a race, drawn from its summaries: speed beside the best peer, and stalls under a burst of prompts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.race.summary import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {
    "tandem": "#2066a8",
    "tandem-1p1d": "#7db3dd",
    "tandem-drafts": "#5b4fa8",
    "vllm": "#d9772b",
    "vllm-1p1d": "#f0b98a",
    "vllm-drafts": "#a8551a",
    "openvino": "#3b8f5a",
    "transformers": "#8a8a8a",
    "llama-cpp": "#8d5aa5",
}
_OTHER = "#b5302f"
_BURST = ("burst", "ITL p99")


def draw(summaries: Sequence[Summary], titles: Mapping[str, str], directory: Path) -> list[Path]:
    """One picture of ratios a shape, and one of the burst; returns the files. What has no figures is not drawn."""
    directory.mkdir(parents=True, exist_ok=True)
    found: list[Path] = []
    for summary in summaries:
        if any(_speeds(summary, system) for system in summary.systems):
            found.append(_save(_ratios(summary, titles), directory / f"race-{summary.shape}.svg"))
    bursts = [summary for summary in summaries if _burst_values(summary)]
    if bursts:
        found.append(_save(_burst(bursts), directory / "race-burst.svg"))
    return found


def _ratios(summary: Summary, titles: Mapping[str, str]) -> "Figure":
    """Bars: each system's speed in each workload's own figure, the best peer's being 1."""
    figure, (axes,) = _panels(1, 9.6)
    headlines = [workload for workload, _ in summary.headlines()]
    systems = [system for system in summary.systems if _speeds(summary, system)]
    width = 0.84 / len(systems)
    for index, system in enumerate(systems):
        speeds = _speeds(summary, system)
        places = [headlines.index(workload) - 0.42 + width * (index + 0.5) for workload in speeds]
        axes.bar(places, list(speeds.values()), width, label=system, color=_COLOURS.get(system, _OTHER))
    axes.axhline(1.0, color="#444444", linewidth=1)
    figures = dict(summary.headlines())
    labels = [f"{titles.get(name, name).replace(', ', chr(10))}\n{figures[name]}" for name in headlines]
    axes.set_xticks(range(len(headlines)), labels, fontsize=8)
    axes.set_ylabel("speed, best peer = 1")
    axes.set_title(f"{summary.shape}: higher is better")
    axes.legend(frameon=False, fontsize=8, ncols=4)
    return figure


def _speeds(summary: Summary, system: str) -> dict[str, float]:
    """Beside the best peer, by workload."""
    found: dict[str, float] = {}
    for workload, name in summary.headlines():
        ratio = summary.ratio(workload, name, system, summary.best_peer(workload, name))
        if ratio is not None:
            found[workload] = ratio
    return found


def _burst(summaries: Sequence[Summary]) -> "Figure":
    """A panel a shape, logarithmic."""
    figure, panels = _panels(len(summaries), 4.8 * len(summaries))
    for axes, summary in zip(panels, summaries, strict=True):
        values = _burst_values(summary)
        axes.barh(list(values), list(values.values()), color=[_COLOURS.get(name, _OTHER) for name in values])
        axes.bar_label(axes.containers[0], fmt="%.0f", padding=3, fontsize=8)  # type: ignore[arg-type]
        axes.set_xscale("log")
        axes.margins(x=0.15)
        axes.invert_yaxis()
        axes.set_xlabel("ms, 99th percentile")
        axes.set_title(f"{summary.shape}: gaps between tokens while long prompts arrive", fontsize=9)
    return figure


def _burst_values(summary: Summary) -> dict[str, float]:
    workload, name = _BURST
    cells = {system: summary.cells.get((workload, system, name)) for system in summary.systems}
    return {system: cell.value for system, cell in cells.items() if cell is not None}


def _panels(count: int, width: float) -> "tuple[Figure, Sequence[Axes]]":
    """NOTE: no pyplot: it keeps what it draws, and looks for a screen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(1, count, squeeze=False).flat)
    for one in axes:
        one.grid(True, color="#e4e4e4", linewidth=0.7)
        one.set_axisbelow(True)
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: "Figure", path: Path) -> Path:
    """Without a date, and with text as text: a picture that says the same has the same bytes."""
    import matplotlib as mpl

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem}):
        figure.savefig(path, metadata={"Date": None})
    return path
