import math
import random
from itertools import pairwise

import pytest

from tandem.core.errors import InvalidRequestError
from tandem.planner_service.distribution import NOTHING, Distribution

BOUNDS = (1.0, 2.0, 5.0, 10.0, math.inf)


def measured(values: list[float]) -> Distribution:
    return Distribution(BOUNDS, tuple(float(sum(v <= bound for v in values)) for bound in BOUNDS), sum(values))


def test_a_quantile_lies_in_the_bucket_of_the_true_one() -> None:
    chance = random.Random(5)
    for share in (0.05, 0.5, 0.9, 0.95, 0.99):
        values = sorted(chance.expovariate(0.4) for _ in range(500))
        exact = values[math.ceil(share * 500) - 1]
        found = measured(values).quantile(share)
        assert found is not None
        low, high = next((low, high) for low, high in pairwise((0.0, *BOUNDS)) if low < exact <= high)
        assert low <= found <= min(high, 10.0)


def test_beyond_the_last_bound_it_is_that_bound() -> None:
    assert measured([50.0, 60.0]).quantile(0.95) == 10.0


def test_nothing_has_neither_mean_nor_quantile() -> None:
    for empty in (NOTHING, measured([])):
        assert (empty.mean, empty.quantile(0.95), empty.num_samples) == (None, None, 0)


def test_the_difference_is_what_came_between() -> None:
    before, after = measured([0.5, 3.0]), measured([0.5, 3.0, 1.5, 7.0])
    assert after.since(before) == measured([1.5, 7.0])
    assert after.since(before).mean == 4.25


def test_who_began_anew_or_has_other_buckets_counts_whole() -> None:
    after = measured([0.5])
    assert after.since(measured([1.0, 2.0])) == after
    assert after.since(Distribution((math.inf,), (1.0,), 1.0)) == after


def test_a_half_updated_histogram_gives_no_negative_bucket() -> None:
    before = Distribution(BOUNDS, (1.0, 2.0, 2.0, 2.0, 2.0), 3.0)
    after = Distribution(BOUNDS, (3.0, 3.0, 3.0, 3.0, 3.0), 2.0)
    assert after.since(before) == Distribution(BOUNDS, (2.0, 2.0, 2.0, 2.0, 2.0), 0.0)


def test_two_add_up_and_of_other_buckets_the_fuller_stands() -> None:
    assert measured([1.0]) + measured([4.0]) == measured([1.0, 4.0])
    assert measured([1.0]) + NOTHING == measured([1.0])
    assert NOTHING + measured([1.0]) == measured([1.0])
    assert measured([1.0, 3.0]).scaled(0.5).mean == 2.0


@pytest.mark.parametrize(
    ("bounds", "counts"),
    [
        ((1.0, 2.0), (1.0, 2.0)),
        ((2.0, 1.0, math.inf), (1.0, 2.0, 3.0)),
        ((1.0, math.inf), (2.0, 1.0)),
        ((1.0, math.inf), (1.0,)),
        ((1.0, math.inf), (-1.0, 1.0)),
        ((1.0, math.inf), (1.0, math.nan)),
    ],
)
def test_what_is_no_histogram_is_refused(bounds: tuple[float, ...], counts: tuple[float, ...]) -> None:
    with pytest.raises(InvalidRequestError):
        Distribution(bounds, counts)
