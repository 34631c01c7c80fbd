"""Re-sharding: every cell that is lacked comes exactly once, from a rank that holds it, and nothing else moves."""

from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.architecture.rectangles import Rectangle, Slice, head_range, plan_slices
from tandem.core.errors import IncompatiblePeerError

Cell = tuple[str, int, int, int]
WIDTHS = (1, 2, 4)
PLANES = {"k": 0, "v": 0, "latent": 1}


def cells(rectangle: Rectangle) -> Iterator[Cell]:
    for layer in rectangle.layers:
        for head in rectangle.heads:
            for block in rectangle.blocks:
                yield rectangle.plane, layer, head, block


def part_of(plane: str, num_heads: int, rank: int, num_ranks: int, layers: range, blocks: range) -> Rectangle:
    return Rectangle(plane, layers, head_range(num_heads, rank, num_ranks), blocks)


def check(lacking: Sequence[Sequence[Rectangle]], held: Sequence[Sequence[Rectangle]]) -> list[Slice]:
    found = plan_slices(lacking, held)
    assert found == plan_slices(lacking, held), "it depends on something else than its arguments"
    for rank, rectangles in enumerate(lacking):
        moved = Counter(cell for each in found if each.destination == rank for cell in cells(each.part))
        assert moved == Counter(cell for rectangle in rectangles for cell in cells(rectangle))
    for each in found:
        assert set(cells(each.part)) <= {cell for rectangle in held[each.source] for cell in cells(rectangle)}
    return found


@given(
    readers=st.sampled_from(WIDTHS),
    sources=st.sampled_from(WIDTHS),
    num_heads=st.sampled_from((1, 2, 4, 8, 12)),
    planes=st.sets(st.sampled_from(sorted(PLANES)), min_size=1),
    layers=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), min_size=1, max_size=2),
    held_blocks=st.integers(1, 7),
    first=st.integers(0, 6),
)
def test_every_pair_of_widths(
    readers: int,
    sources: int,
    num_heads: int,
    planes: set[str],
    layers: list[tuple[int, int]],
    held_blocks: int,
    first: int,
) -> None:
    """Blocks before `first` are held already: a prefix, which is not pulled again."""
    spans = [range(10 * i + start, 10 * i + start + count) for i, (start, count) in enumerate(layers)]
    heads = {plane: 1 if PLANES[plane] else num_heads for plane in planes}

    def all_parts(num_ranks: int, blocks: range) -> list[list[Rectangle]]:
        return [
            [part_of(p, heads[p], rank, num_ranks, span, blocks) for p in sorted(planes) for span in spans]
            for rank in range(num_ranks)
        ]

    found = check(all_parts(readers, range(first, held_blocks)), all_parts(sources, range(held_blocks)))
    assert all(each.part.blocks.start >= first for each in found)


@given(data=st.data(), num_sources=st.integers(1, 5))
def test_ranks_that_hold_any_parts(data: st.DataObject, num_sources: int) -> None:
    """As after a loss, where ranks hold different and overlapping remains."""
    span = st.tuples(st.integers(0, 4), st.integers(0, 5)).map(lambda ends: range(ends[0], sum(ends)))
    box = st.builds(Rectangle, st.sampled_from(("k", "v")), span, span, span)
    held = [data.draw(st.lists(box, max_size=3)) for _ in range(num_sources)]
    wanted = data.draw(box)
    there = {cell for rectangles in held for rectangle in rectangles for cell in cells(rectangle)}
    if there.issuperset(cells(wanted)):
        check([[wanted]], held)
    else:
        with pytest.raises(IncompatiblePeerError, match=f"none of {num_sources} ranks holds {wanted.plane}: layers"):
            plan_slices([[wanted]], held)


@pytest.mark.parametrize(("num_heads", "readers", "sources"), [(1, 2, 4), (1, 4, 4), (2, 2, 4), (1, 4, 2)])
def test_replicas_share_the_load(num_heads: int, readers: int, sources: int) -> None:
    def all_parts(num_ranks: int) -> list[list[Rectangle]]:
        return [[part_of("k", num_heads, r, num_ranks, range(2), range(3))] for r in range(num_ranks)]

    used = Counter(each.source for each in check(all_parts(readers), all_parts(sources)))
    assert len(used) == min(readers, sources), used
    assert len(set(used.values())) == 1, used


def test_a_rank_that_holds_all_is_asked_alone() -> None:
    whole = Rectangle("k", range(4), range(4), range(2))
    halves = [Rectangle("k", range(4), range(2), range(2)), Rectangle("k", range(4), range(2, 4), range(2))]
    assert plan_slices([[whole]], [[halves[0]], [halves[1]], [whole]]) == [Slice(0, 2, whole)]


@pytest.mark.parametrize(("num_heads", "num_ranks"), [(8, 4), (4, 4), (2, 4), (1, 8), (3, 1), (12, 4)])
def test_heads_of_ranks(num_heads: int, num_ranks: int) -> None:
    found = [head_range(num_heads, rank, num_ranks) for rank in range(num_ranks)]
    times = max(1, num_ranks // num_heads)
    assert Counter(head for heads in found for head in heads) == dict.fromkeys(range(num_heads), times)
    assert found == sorted(found, key=lambda heads: heads.start)
