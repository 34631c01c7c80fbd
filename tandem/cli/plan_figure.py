"""Draws the rooflines of a plan into a picture file. Imports matplotlib only then, and explains how to get it."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from tandem.cli.plan_picture import PlotPoint
from tandem.core.errors import ConfigurationError, shown
from tandem.planning.roofline import Roofline

_COLOURS = ("#2066a8", "#8a8a8a")
_MARK_COLOURS = ("#d9772b", "#3b8f5a", "#b5302f", "#8a8a8a")
_SUFFIXES = (".svg", ".png", ".pdf")


def check_figure(path: Path) -> None:
    """Checks that a figure can be drawn to `path`.

    Raises:
        ConfigurationError: matplotlib is missing, or the file's name has an unknown ending.
    """
    if path.suffix not in _SUFFIXES:
        raise ConfigurationError(f"--figure={shown(str(path))}: end the name with one of {', '.join(_SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError("--figure needs matplotlib, which is not here: pip install 'tandem[load]'")


def save_roofline(path: Path, title: str, roofs: Sequence[tuple[str, Roofline]], marks: Sequence[PlotPoint]) -> None:
    """Draws rooflines and `marks` to `path`; equal plans give equal bytes.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for (words, roof), colour in zip(roofs, _COLOURS, strict=False):
        x = _intensities(roof, marks)
        axes.plot(x, [roof.attainable_flops(one) / 1e12 for one in x], color=colour, label=words)
    for mark, colour in zip(marks, _MARK_COLOURS, strict=False):
        axes.plot([mark.point.intensity], [mark.point.flops / 1e12], "o", color=colour, label=mark.words)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s", title=title)
    axes.grid(True, color="#e4e4e4", linewidth=0.7)
    axes.legend(frameon=False, fontsize=8)
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    try:
        with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "roofline"}):
            figure.savefig(path, metadata=metadata, dpi=110)
    except OSError as error:
        raise ConfigurationError(
            f"--figure={shown(str(path))} cannot be written ({error}); name another file"
        ) from error


def _intensities(roof: Roofline, marks: Sequence[PlotPoint]) -> list[float]:
    """Ends and ridge of a roof: on logarithmic axes it consists of two straight lines."""
    ridge = roof.hardware.ridge
    found = [mark.point.intensity for mark in marks]
    return [min([*found, ridge / 300]) / 2, ridge, max([*found, 100 * ridge]) * 2]
