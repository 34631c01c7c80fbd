import random
import statistics
from collections.abc import Callable

import pytest

from tandem.core.errors import ConfigurationError
from tandem.workload.lengths import Fixed, Lengths, LogNormal, Uniform


def drawn(lengths: Lengths, num_draws: int = 5000) -> list[int]:
    source = random.Random(0)
    return [lengths.draw(source) for _ in range(num_draws)]


def test_log_normal_has_its_median_its_tail_and_its_bounds() -> None:
    found = sorted(drawn(LogNormal(1000, 8000, 30_000)))
    assert statistics.median(found) == pytest.approx(1000, rel=0.1)
    assert found[4500] == pytest.approx(8000, rel=0.1)
    assert found[0] >= 1
    assert found[-1] == 30_000


def test_the_others_stay_where_they_are_told() -> None:
    assert set(drawn(Fixed(7))) == {7}
    assert set(drawn(Uniform(3, 5))) == {3, 4, 5}
    assert set(drawn(LogNormal(5, 5, 5))) == {5}


@pytest.mark.parametrize(
    "make",
    [
        lambda: Fixed(0),
        lambda: Uniform(5, 3),
        lambda: Uniform(0, 3),
        lambda: LogNormal(100, 50, 200),
        lambda: LogNormal(100, 500, 200),
    ],
)
def test_impossible_lengths_are_refused(make: Callable[[], Lengths]) -> None:
    with pytest.raises(ConfigurationError, match="lengths need"):
        make()
