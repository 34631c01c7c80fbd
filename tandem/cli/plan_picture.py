"""Draws rooflines with characters: attainable FLOP/s over arithmetic intensity, on logarithmic axes, with points."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.planning.roofline import Roofline
from tandem.planning.worker_facts import Point

_COLUMNS, _ROWS = 66, 13
_LABEL_COLUMNS = 9
_BELOW_RIDGE, _ABOVE_RIDGE = 300.0, 100.0


@dataclass(frozen=True, slots=True)
class PlotPoint:
    """A point, the character that stands for it, and its text in the legend."""

    point: Point
    character: str
    words: str


@dataclass(frozen=True, slots=True)
class _Axes:
    """Converts intensities and FLOP/s to columns and rows. Fields: decimal logarithms of the axes' ends."""

    left: float
    right: float
    bottom: float
    top: float

    def column(self, intensity: float) -> int:
        return _place(math.log10(intensity), self.left, self.right, _COLUMNS)

    def row(self, flops: float) -> int:
        """Row of a value, counted from the bottom."""
        return _place(math.log10(flops), self.bottom, self.top, _ROWS)

    def intensity(self, column: int) -> float:
        return float(10 ** (self.left + (column + 0.5) / _COLUMNS * (self.right - self.left)))


def draw_roofline(roofs: Sequence[tuple[str, Roofline]], marks: Sequence[PlotPoint]) -> list[str]:
    """Returns the picture's lines of text. The first roof is drawn with lines, a second one with dots."""
    axes = _axes([roof for _, roof in roofs], marks)
    grid = [[" "] * _COLUMNS for _ in range(_ROWS)]
    for index, (_, roof) in reversed(list(enumerate(roofs))):
        _draw_roof(grid, axes, roof, index)
    for mark in marks:
        grid[axes.row(mark.point.flops)][axes.column(mark.point.intensity)] = mark.character
    lines = [f"{_label(axes, row):>{_LABEL_COLUMNS}} ┤{''.join(grid[row])}" for row in range(_ROWS - 1, -1, -1)]
    return [*lines, *_bottom(axes), *_legend(roofs, marks)]


def _axes(roofs: Sequence[Roofline], marks: Sequence[PlotPoint]) -> _Axes:
    ridges = [roof.hardware.ridge for roof in roofs]
    intensities = [mark.point.intensity for mark in marks]
    left = math.log10(min(*intensities, min(ridges) / _BELOW_RIDGE) / 1.5)
    right = math.log10(max(*intensities, max(ridges) * _ABOVE_RIDGE) * 1.5)
    lowest = [min(roof.attainable_flops(10**left) for roof in roofs), *(mark.point.flops for mark in marks)]
    return _Axes(left, right, math.log10(min(lowest)), math.log10(max(roof.flops for roof in roofs) * 1.3))


def _draw_roof(grid: list[list[str]], axes: _Axes, roof: Roofline, index: int) -> None:
    for column in range(_COLUMNS):
        intensity = axes.intensity(column)
        flops = roof.attainable_flops(intensity)
        if math.log10(flops) >= axes.bottom:
            line = "─" if intensity >= roof.hardware.ridge else "/"
            grid[axes.row(flops)][column] = "·" if index else line


def _place(value: float, low: float, high: float, cells: int) -> int:
    return min(cells - 1, max(0, int((value - low) / (high - low) * cells)))


def _label(axes: _Axes, row: int) -> str:
    """FLOP/s at every fourth row."""
    if row % 4 != 0:
        return ""
    return _si(10 ** (axes.bottom + (row + 0.5) / _ROWS * (axes.top - axes.bottom)))


def _bottom(axes: _Axes) -> list[str]:
    rule, words = ["─"] * _COLUMNS, [" "] * (_COLUMNS + 8)
    for decade in range(math.ceil(axes.left), math.floor(axes.right) + 1):
        column = axes.column(10.0**decade)
        text = f"{10.0**decade:g}" if decade < 5 else f"1e{decade}"
        rule[column] = "┴"
        words[column : column + len(text)] = text
    indent = " " * (_LABEL_COLUMNS + 1)
    return [f"{indent}└{''.join(rule)}", f"{indent} {''.join(words).rstrip()}  FLOP per byte"]


def _legend(roofs: Sequence[tuple[str, Roofline]], marks: Sequence[PlotPoint]) -> list[str]:
    indent = " " * (_LABEL_COLUMNS + 2)
    lines = [
        f"{indent}{'·' if index else '─'} {words}: {_si(roof.flops)}FLOP/s, {_si(roof.bytes_per_s)}B/s, ridge at "
        f"{roof.hardware.ridge:.0f} FLOP per byte"
        for index, (words, roof) in enumerate(roofs)
    ]
    return lines + [
        f"{indent}{mark.character} {mark.words}: {mark.point.intensity:,.0f} FLOP per byte, "
        f"{_si(mark.point.flops)}FLOP/s"
        for mark in marks
    ]


def _si(value: float) -> str:
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}"
    return f"{value:.3g} "
