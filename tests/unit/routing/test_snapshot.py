import math
from typing import Any

import pytest

from tandem.core.errors import InvalidRequestError
from tandem.routing.snapshot import MAX_SOURCES, Links, LinkState
from tandem.routing.speed import PrefillWork
from tests.unit.routing.builders import request, worker


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 0),
        ("chunk_tokens", 0),
        ("num_total_blocks", -1),
        ("num_free_blocks", -1),
        ("num_running", -3),
        ("queued", PrefillWork(1, -5, 0)),
        ("queued", PrefillWork(1, float("nan"), 0)),
        ("reported_at_s", float("nan")),
        ("figures_age_s", -1.0),
        ("figures_age_s", float("inf")),
        ("taken_age_s", -1.0),
    ],
)
def test_an_impossible_report_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"'w'.*{field}="):
        worker("w", **{field: value})


@pytest.mark.parametrize("changes", [{"num_tokens": 0}, {"num_expected_output": 0}, {"max_tpot_ms": 0.0}])
def test_an_impossible_request_is_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(changes))):
        request(**changes)


@pytest.mark.parametrize(("bytes_per_s", "latency_ms"), [(0, 1), (-1, 1), (1e9, -1), (float("nan"), 0)])
def test_an_impossible_link_is_refused(bytes_per_s: float, latency_ms: float) -> None:
    with pytest.raises(InvalidRequestError, match="link"):
        LinkState(bytes_per_s, latency_ms)


def test_links_are_directed_and_unmeasured_ones_are_the_default() -> None:
    default, fast = LinkState(1e9, 1.0), LinkState(1e10, 0.1)
    links = Links(default, {("a", "b"): fast})
    assert links.between("a", "b") == fast
    assert links.between("b", "a") == default
    assert links.best_into["b"] == fast
    links.forget("a")
    assert links.between("a", "b") == default


def test_a_cut_link_is_endless_until_it_is_not_among_the_cut_ones() -> None:
    default, fast = LinkState(1e9, 1.0), LinkState(1e10, 0.1)
    links = Links(default, {("a", "d"): fast, ("b", "d"): fast})
    links.cut(["a", "c"], "d")
    assert links.cut_into("d") == {"a", "c"}
    assert links.between("a", "d").latency_ms == links.out_of("c")["d"].latency_ms == math.inf
    assert links.between("d", "a") == default
    assert links.best_into["d"] == fast
    links.cut(["c"], "d")
    assert (links.between("a", "d"), links.between("b", "d")) == (default, fast)
    assert "d" not in links.out_of("a")
    links.update("a", "d", fast)
    links.cut([], "d")
    assert (links.cut_into("d"), links.between("a", "d"), links.between("c", "d")) == (frozenset(), fast, default)


def test_a_worker_that_is_forgotten_is_cut_from_nobody() -> None:
    links = Links(LinkState(1e9, 1.0))
    links.cut(["a"], "d")
    links.forget("d")
    assert links.cut_into("d") == frozenset()
    links.cut(["a"], "d")
    links.forget("a")
    assert links.between("a", "d") == links.default
    links.cut(["a"], "d")
    assert links.between("a", "d").latency_ms == math.inf


def test_links_are_bounded_for_each_destination_and_forgotten_both_ways() -> None:
    links, fast = Links(LinkState(1e9, 1.0)), LinkState(1e10, 0.1)
    for i in range(MAX_SOURCES + 10):
        links.update(f"p{i}", "d", fast)
    links.update("d", "p5", fast)
    assert len(links.into("d")) == MAX_SOURCES
    assert links.between("p9", "d") == links.default
    assert not links.out_of("p9")
    assert links.between("p10", "d") == fast
    assert dict(links.out_of("p10")) == {"d": fast}
    links.forget("d")
    assert not links.into("d")
    assert not links.out_of("p10")
    assert not links.into("p5")
    assert "d" not in links.best_into


def test_a_measurement_that_says_the_same_changes_nothing() -> None:
    links, fast = Links(LinkState(1e9, 1.0)), LinkState(1e10, 0.1)
    links.update("a", "b", fast)
    links.take_improved()
    links.update("a", "b", LinkState(1e10, 0.1))
    links.update("a", "b", LinkState(5e9, 0.1))
    assert not links.take_improved()
    assert links.between("a", "b") == LinkState(5e9, 0.1)
