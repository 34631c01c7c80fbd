"""Non-negative least squares, solved exactly: unknowns are few enough to try every set of positive ones."""

from itertools import combinations

Vector = tuple[float, ...]
Matrix = tuple[tuple[float, ...], ...]


def solve_nonnegative(products: Matrix, targets: Vector) -> Vector:
    """The x >= 0 that minimises x·A·x / 2 - b·x, for a symmetric positive definite A of a few rows.

    The minimum is the unconstrained one over the unknowns that are positive; sets of them are tried, largest first.
    """
    num_unknowns = len(targets)
    best: Vector = (0.0,) * num_unknowns
    best_value = 0.0
    for num_free in range(num_unknowns, 0, -1):
        for free in combinations(range(num_unknowns), num_free):
            inside = _solve(
                [[products[i][j] for j in free] for i in free],
                [targets[i] for i in free],
            )
            value = -sum(targets[i] * x for i, x in zip(free, inside, strict=True)) / 2
            if min(inside) >= 0 and value < best_value:
                best_value = value
                best = _spread(free, inside, num_unknowns)
        if num_free == num_unknowns and best_value < 0:
            return best
    return best


def _spread(free: tuple[int, ...], inside: list[float], num_unknowns: int) -> Vector:
    values = dict(zip(free, inside, strict=True))
    return tuple(values.get(i, 0.0) for i in range(num_unknowns))


def _solve(matrix: list[list[float]], target: list[float]) -> list[float]:
    """Cholesky-free elimination; a positive definite matrix needs no pivoting."""
    size = len(target)
    rows = [[*line, value] for line, value in zip(matrix, target, strict=True)]
    for i in range(size):
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [x - factor * y for x, y in zip(rows[j], rows[i], strict=True)]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return solution
