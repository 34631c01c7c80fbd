import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.routing.least_squares import Matrix, Vector, solve_nonnegative


def gram(rows: list[Vector]) -> Matrix:
    return tuple(tuple(sum(row[i] * row[j] for row in rows) + (i == j) for j in range(3)) for i in range(3))


def value(products: Matrix, targets: Vector, x: Vector) -> float:
    quadratic = sum(x[i] * products[i][j] * x[j] for i in range(3) for j in range(3))
    return quadratic / 2 - sum(target * part for target, part in zip(targets, x, strict=True))


numbers = st.floats(-3, 3)
rows = st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=5)


@given(rows=rows, targets=st.tuples(numbers, numbers, numbers), seed=st.integers(0, 1000))
def test_no_other_point_of_the_orthant_is_lower(rows: list[Vector], targets: Vector, seed: int) -> None:
    products = gram(rows)
    found = solve_nonnegative(products, targets)
    assert min(found) >= 0
    source = random.Random(seed)
    lowest = value(products, targets, found)
    for _ in range(50):
        near = tuple(max(0.0, x + source.choice([1, 0.01]) * source.uniform(-1, 1)) for x in found)
        assert value(products, targets, near) >= lowest - 1e-9


def test_an_unconstrained_minimum_is_found_exactly() -> None:
    products = ((2.0, 0.0, 0.0), (0.0, 4.0, 1.0), (0.0, 1.0, 4.0))
    assert solve_nonnegative(products, (2.0, 5.0, 5.0)) == pytest.approx((1.0, 1.0, 1.0))
