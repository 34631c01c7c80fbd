"""Draws figures of a load test's result from its JSON: latency CDFs, latencies, throughput and pools over time.

matplotlib is imported only when something is drawn.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.core.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Value = Mapping[str, Any]
_BLUE, _ORANGE, _GREEN, _GREY, _RED = "#2066a8", "#d9772b", "#3b8f5a", "#8a8a8a", "#b5302f"
_POOL_COLOURS = {"prefill": _ORANGE, "decode": _BLUE, "both": _GREEN}
_CDFS = {
    "time to first token": (("ttft_s", "from due time", _BLUE), ("ttft_from_send_s", "from sending", _ORANGE)),
    "time per output token": (("tpot_s", "mean of an answer", _BLUE), ("gap_s", "between two events", _GREY)),
    "whole answer": (("e2e_s", "from due time", _BLUE),),
}


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(result: Value, directory: Path, kind: str) -> list[Path]:
    """Draws the plots of `result`, a result's JSON, as files of type `kind`; returns their paths.

    Raises:
        ConfigurationError: they cannot be written.
    """
    pictures = {"latency": _latency, "over-time": _over_time, "throughput": _throughput}
    paths = [directory / f"{name}.{kind}" for name in pictures]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, picture in zip(paths, pictures.values(), strict=True):
            _save(picture(result), path)
    except OSError as error:
        raise ConfigurationError(f"{directory}: {error}; name a directory that can be written") from error
    return paths


def _save(figure: "Figure", path: Path) -> None:
    """Saves a figure reproducibly: without a date and with text as text, so that equal plots have equal bytes."""
    import matplotlib as mpl

    metadata = {"Date": None} if path.suffix == ".svg" else {}
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem}):
        figure.savefig(path, metadata=metadata, dpi=110)


def _panels(rows: int, columns: int, height: float) -> "tuple[Figure, Sequence[Axes]]":
    """A figure and its axes. NOTE: avoids pyplot, which keeps every figure and looks for a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for one in axes:
        one.grid(True, color="#e4e4e4", linewidth=0.7)
        one.set_axisbelow(True)
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _latency(result: Value) -> "Figure":
    figure, axes = _panels(1, 3, 3.2)
    objectives = {"time to first token": "ttft_s", "time per output token": "tpot_s"}
    for one, (title, curves) in zip(axes, _CDFS.items(), strict=True):
        for name, label, colour in curves:
            _cdf(one, result["quantiles"].get(name) or [], label, colour)
        if title in objectives:
            one.axvline(1000 * result["slo"][objectives[title]], color=_RED, linewidth=1, linestyle="--")
        one.set(title=title, xlabel="ms", ylim=(0, 1.01))
        _legend(one)
    axes[0].set_ylabel("share of requests")
    return figure


def _cdf(axes: "Axes", quantiles: Sequence[float], label: str, colour: str) -> None:
    if quantiles:
        last = len(quantiles) - 1
        shares = [index / last for index in range(last + 1)]
        axes.plot([1000 * value for value in quantiles], shares, color=colour, label=label, linewidth=1.6)
        axes.set_xscale("log" if min(quantiles) > 0 and max(quantiles) > 20 * min(quantiles) else "linear")


def _over_time(result: Value) -> "Figure":
    figure, axes = _panels(2, 1, 4.6)
    for one, name, title in zip(axes, ("ttft", "tpot"), ("time to first token", "time per output token"), strict=True):
        for rank, style in (("p99", "-"), ("p50", "--")):
            found = [(window["at_s"], window[f"{name}_{rank}_s"]) for window in result["windows"]]
            points = [(at_s, 1000 * value) for at_s, value in found if value is not None]
            one.plot(*_columns(points), style, color=_BLUE, label=rank, linewidth=1.4, marker=".", markersize=3)
        one.axhline(1000 * result["slo"][f"{name}_s"], color=_RED, linewidth=1, linestyle=":", label="objective")
        one.set(title=f"{title}, by when requests were due", ylabel="ms", ylim=(0, None))
        _legend(one)
    axes[-1].set_xlabel("s")
    return figure


def _throughput(result: Value) -> "Figure":
    figure, axes = _panels(4, 1, 7.4)
    windows, width_s = result["windows"], result["window_s"]
    times = [window["at_s"] for window in windows]
    axes[0].plot(times, [window["output_tokens_per_s"] for window in windows], color=_BLUE, linewidth=1.4)
    counts = (("num_due", "due", _GREY), ("num_completed", "answered", _GREEN), ("num_refused", "refused", _ORANGE))
    for name, label, colour in (*counts, ("num_failed", "failed", _RED)):
        if any(window[name] for window in windows):
            rates = [window[name] / width_s for window in windows]
            axes[1].plot(times, rates, color=colour, label=label, linewidth=1.4)
    _pools(axes[2], axes[3], result["pools"])
    titles = ("output tokens a second", "requests a second", "workers that are ready", "requests at workers")
    for one, title in zip(axes, titles, strict=True):
        one.set(title=title, xlim=(0, max(result["duration_s"], width_s)), ylim=(0, None))
        _legend(one)
    axes[-1].set_xlabel("s")
    return figure


def _pools(sizes: "Axes", requests: "Axes", samples: Sequence[Value]) -> None:
    for role, colour in _POOL_COLOURS.items():
        own = [sample for sample in samples if sample["role"] == role]
        if not own:
            continue
        times = [sample["at_s"] for sample in own]
        sizes.step(
            times, [sample["num_ready"] for sample in own], where="post", color=colour, label=role, linewidth=1.8
        )
        requests.plot(times, [sample["num_running"] for sample in own], color=colour, label=f"{role}, running")
        waiting = [sample["num_waiting"] for sample in own]
        requests.plot(times, waiting, color=colour, label=f"{role}, waiting", linestyle=":")
    most = max((sample["num_ready"] for sample in samples), default=1)
    sizes.set_yticks(range(0, most + 2, max(1, most // 5)))


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _legend(axes: "Axes") -> None:
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize="small")
