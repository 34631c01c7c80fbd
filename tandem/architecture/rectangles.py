"""Re-sharding of KV state between workers as arithmetic: the slices that each rank of the reading worker pulls from
each rank of the source.

A rank's state is described by rectangles: for one plane (a named array of state) a range of layers, of heads and of
blocks. Planes without heads are replicated and count as one head. Pure functions, without tensors or addresses.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from tandem.core.errors import IncompatiblePeerError

_Axis = Literal["layers", "heads", "blocks"]
_AXES: tuple[_Axis, ...] = get_args(_Axis)


@dataclass(frozen=True, slots=True)
class Rectangle:
    """The state in `plane` of the given `layers`, `heads` and `blocks`. Ranges have a step of 1; an empty one holds
    nothing.

    Args:
        plane: name of a plane, or of a segment of one, as in `StateSpec.segments`.
        layers: indices among the layers that keep state.
        heads: indices of the plane's heads in the whole model.
        blocks: indices in a request's block table.
    """

    plane: str
    layers: range
    heads: range
    blocks: range

    @property
    def num_cells(self) -> int:
        """Number of combinations of layer, head and block."""
        return len(self.layers) * len(self.heads) * len(self.blocks)

    def common(self, other: "Rectangle") -> "Rectangle | None":
        """The intersection with `other`; None = they have nothing in common."""
        if self.plane != other.plane:
            return None
        part = Rectangle(
            self.plane,
            _common(self.layers, other.layers),
            _common(self.heads, other.heads),
            _common(self.blocks, other.blocks),
        )
        return part if part.num_cells else None

    def without(self, part: "Rectangle") -> "list[Rectangle]":
        """The rest of this rectangle without `part`, which lies within it: at most six disjoint rectangles."""
        rest, middle = [], self
        for axis in _AXES:
            whole, taken = getattr(middle, axis), getattr(part, axis)
            for left in (range(whole.start, taken.start), range(taken.stop, whole.stop)):
                if left:
                    rest.append(_with(middle, axis, left))
            middle = _with(middle, axis, taken)
        return rest

    def __str__(self) -> str:
        spans = (f"{axis} {found.start} to {found.stop - 1}" for axis in _AXES if (found := getattr(self, axis)))
        return f"{self.plane}: {', '.join(spans)}"


@dataclass(frozen=True, slots=True)
class Slice:
    """State that rank `destination` of the reader pulls from rank `source` of the other worker."""

    destination: int
    source: int
    part: Rectangle


def head_range(num_heads: int, rank: int, num_ranks: int) -> range:
    """Heads that a rank holds: equal consecutive parts. With fewer heads than ranks, neighbouring ranks hold the same
    head.

    `num_heads` divides `num_ranks` or the other way round.
    """
    parts = min(num_heads, num_ranks)
    size, part = num_heads // parts, rank * parts // num_ranks
    return range(part * size, (part + 1) * size)


def plan_slices(lacking: Sequence[Sequence[Rectangle]], held: Sequence[Sequence[Rectangle]]) -> list[Slice]:
    """Slices that each rank of the reader has to pull: every missing cell exactly once, and nothing else.

    If several source ranks hold a cell, the one that holds most of the rectangle is chosen. Among equals, the reader's
    ranks begin with different ones, so that replicas share the load. The result depends on the arguments alone.

    Args:
        lacking: for each rank of the reader, the missing rectangles, which do not overlap.
        held: for each rank of the source, the rectangles that it holds.

    Raises:
        IncompatiblePeerError: no rank of the source holds some cell; the message names it.
    """
    return [
        found
        for destination, rectangles in enumerate(lacking)
        for rectangle in rectangles
        for found in _pulled(destination, rectangle, held)
    ]


def _pulled(destination: int, wanted: Rectangle, held: Sequence[Sequence[Rectangle]]) -> Iterator[Slice]:
    overlaps = [
        Slice(destination, source, part)
        for source, rectangles in enumerate(held)
        for rectangle in rectangles
        if (part := rectangle.common(wanted)) is not None
    ]
    overlaps.sort(key=lambda each: (-each.part.num_cells, (each.source - destination) % len(held)))
    missing = [wanted] if wanted.num_cells else []
    for overlap in overlaps:
        left = []
        for rectangle in missing:
            part = rectangle.common(overlap.part)
            if part is None:
                left.append(rectangle)
            else:
                yield replace(overlap, part=part)
                left += rectangle.without(part)
        missing = left
    if missing:
        raise IncompatiblePeerError(f"none of {len(held)} ranks holds {missing[0]}")


def _common(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))


def _with(rectangle: Rectangle, axis: _Axis, span: range) -> Rectangle:
    spans = {each: span if each == axis else getattr(rectangle, each) for each in _AXES}
    return Rectangle(rectangle.plane, spans["layers"], spans["heads"], spans["blocks"])
