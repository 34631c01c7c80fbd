from typing import Any

import pytest

from tandem.core.errors import InvalidRequestError
from tandem.routing.snapshot import Links, LinkState
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
