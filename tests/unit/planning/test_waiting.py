"""Waiting formulas against the textbook's exact cases and a small simulation."""

import heapq
import math
import random

import pytest

from tandem.planning.waiting import mean_wait, wait_quantile, waiting_chance


def test_one_server_waits_as_often_as_it_is_busy() -> None:
    assert waiting_chance(1, 0.7) == pytest.approx(0.7)
    assert waiting_chance(3, 0.0) == 0.0
    assert waiting_chance(3, 3.0) == 1.0


def test_erlang_c_of_the_textbook() -> None:
    """c = 2: C = 2 r^2 / (1 + r) with r the use of each."""
    for use in (0.2, 0.5, 0.9):
        assert waiting_chance(2, 2 * use) == pytest.approx(2 * use**2 / (1 + use))


def test_pollaczek_khinchine() -> None:
    for variation in (0.0, 1.0, 2.0):
        expected = 0.8 * 3.0 * (1 + variation**2) / 2 / (1 - 0.8)
        assert mean_wait(1, 0.8, 3.0, variation) == pytest.approx(expected)


def test_no_wait_ends_when_more_arrives_than_is_done() -> None:
    assert mean_wait(2, 2.0, 1.0, 1.0) == math.inf
    assert wait_quantile(2, 2.5, 1.0, 1.0, 0.9) == math.inf
    assert wait_quantile(10, 0.1, 1.0, 1.0, 0.9) == 0.0


@pytest.mark.parametrize(("num_servers", "use"), [(1, 0.6), (4, 0.8)])
def test_quantiles_of_a_simulated_queue(num_servers: int, use: float) -> None:
    source = random.Random(7)
    free_s, now_s, waits = [0.0] * num_servers, 0.0, list[float]()
    for _ in range(60_000):
        now_s += source.expovariate(num_servers * use)
        start_s = max(now_s, heapq.heappop(free_s))
        heapq.heappush(free_s, start_s + source.expovariate(1.0))
        waits.append(start_s - now_s)
    waits.sort()
    found = waits[int(0.95 * len(waits))]
    assert wait_quantile(num_servers, num_servers * use, 1.0, 1.0, 0.95) == pytest.approx(found, rel=0.1)
    assert mean_wait(num_servers, num_servers * use, 1.0, 1.0) == pytest.approx(sum(waits) / len(waits), rel=0.1)
