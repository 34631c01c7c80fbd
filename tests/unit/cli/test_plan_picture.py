from tandem.architecture.catalogue import find_cost
from tandem.cli.plan_picture import PlotPoint, draw_roofline
from tandem.planning.hardware import find_accelerator
from tandem.planning.roofline import Roofline
from tandem.planning.worker_facts import Point

H100 = Roofline(find_cost("qwen3-8b"), find_accelerator("h100"))
ROOF = [("1 x h100", H100)]


def grid(lines: list[str]) -> list[str]:
    return [line.partition("┤")[2] for line in lines if "┤" in line]


def test_the_roof_rises_to_the_ridge_and_is_flat_from_there() -> None:
    rows = grid(draw_roofline(ROOF, [PlotPoint(Point(intensity=2.0, flops=1e12), "d", "decode")]))
    flat = next(row for row in rows if "─" in row)
    assert rows.index(flat) == 0
    assert flat.rstrip().endswith("─" * 20)
    slopes = [max(column for column, one in enumerate(row) if one == "/") for row in rows if "/" in row]
    assert slopes == sorted(slopes, reverse=True)
    assert flat.index("─") == slopes[0] + 1


def test_marks_lie_where_their_figures_say() -> None:
    """A tenfold of both moves a mark as far as the axes do, whatever the other marks."""
    high = PlotPoint(Point(intensity=1e4, flops=5e14), "P", "prefill")
    low = PlotPoint(Point(intensity=2.0, flops=4e12), "d", "decode")
    lines = draw_roofline(ROOF, [high, low])
    rows = grid(lines)
    (p_row,), (d_row,) = ([i for i, row in enumerate(rows) if mark in row] for mark in "Pd")
    assert p_row < d_row
    ticks = next(line for line in lines if line.rstrip().endswith("FLOP per byte") and "ridge" not in line)
    offset = len(lines[0].partition("┤")[0]) + 1
    assert abs(rows[p_row].index("P") + offset - ticks.index("10000")) <= 1
    assert ticks.index("1 ") <= rows[d_row].index("d") + offset < ticks.index("10 ")
    assert "P prefill: 10,000 FLOP per byte, 500 TFLOP/s" in lines[-2]


def test_a_second_kind_is_dotted_and_named() -> None:
    l4 = Roofline(find_cost("qwen3-8b"), find_accelerator("l4"), 2)
    lines = draw_roofline([*ROOF, ("2 x l4", l4)], [PlotPoint(Point(intensity=2.0, flops=1e11), "d", "decode")])
    assert any("·" in row for row in grid(lines))
    assert any("· 2 x l4: 242 TFLOP/s, 600 GB/s, ridge at 403 FLOP per byte" in line for line in lines)
