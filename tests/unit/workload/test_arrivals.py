import random
import statistics
from collections.abc import Iterator
from itertools import islice, pairwise

import pytest

from tandem.core.errors import ConfigurationError
from tandem.workload.arrivals import ClosedLoop, bursts, evenly, poisson, spread_in_ticks
from tandem.workload.trace import TraceRequest


def gaps(arrivals: Iterator[float], num_arrivals: int = 20_000) -> list[float]:
    return [later - earlier for earlier, later in pairwise(islice(arrivals, num_arrivals))]


@pytest.mark.parametrize("variation", [0.5, 1.0, 3.0])
def test_bursts_keep_the_rate_and_have_the_variation(variation: float) -> None:
    found = gaps(bursts(4.0, variation, random.Random(1)))
    assert min(found) >= 0
    assert statistics.mean(found) == pytest.approx(0.25, rel=0.06)
    assert statistics.stdev(found) / statistics.mean(found) == pytest.approx(variation, rel=0.06)


def test_poisson_gaps_are_exponential_and_seeded() -> None:
    found = gaps(poisson(2.0, random.Random(3)))
    assert statistics.median(found) == pytest.approx(0.3466, rel=0.05)
    assert found == gaps(poisson(2.0, random.Random(3)))


def test_even_arrivals() -> None:
    assert list(islice(evenly(4.0), 3)) == [0.0, 0.25, 0.5]


@pytest.mark.parametrize("rate_per_s", [0.0, -1.0, float("nan")])
def test_an_impossible_rate_is_refused_at_once(rate_per_s: float) -> None:
    with pytest.raises(ConfigurationError, match="rate_per_s"):
        poisson(rate_per_s, random.Random(0))
    with pytest.raises(ConfigurationError, match="rate_per_s"):
        evenly(rate_per_s)


def test_arrivals_stay_in_their_tick_in_order_and_cover_it() -> None:
    requests = [TraceRequest(3.0 * (i // 500), i + 1, 1) for i in range(2000)]
    found = list(spread_in_ticks(requests, random.Random(0)))
    assert [request.num_prompt_tokens for request in found] == list(range(1, 2001))
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(found))
    assert all(new.arrival_s // 3 * 3 == old.arrival_s for new, old in zip(found, requests, strict=True))
    assert statistics.mean(request.arrival_s % 3 for request in found) == pytest.approx(1.5, abs=0.1)


def test_a_closed_loop_never_has_more_than_its_clients_in_flight() -> None:
    loop = ClosedLoop(3, 0.0, random.Random(0))
    assert [loop.next_arrival_s() for _ in range(4)] == [0.0, 0.0, 0.0, None]
    loop.ended(5.0)
    assert [loop.next_arrival_s(), loop.next_arrival_s()] == [5.0, None]


def test_clients_think_between_requests() -> None:
    loop = ClosedLoop(1, 2.0, random.Random(0))
    pauses, now_s = [], 0.0
    for _ in range(5000):
        arrival_s = loop.next_arrival_s()
        assert arrival_s is not None
        pauses.append(arrival_s - now_s)
        now_s = arrival_s + 1.0
        loop.ended(now_s)
    assert statistics.mean(pauses) == pytest.approx(2.0, rel=0.06)
    with pytest.raises(ConfigurationError, match="num_clients=0"):
        ClosedLoop(0, 1.0, random.Random(0))
