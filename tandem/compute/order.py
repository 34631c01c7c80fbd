"""Storage orders of matrices: plain rows, or strips in the private layout of the kernels."""

from enum import IntEnum


class Order(IntEnum):
    """Storage order of a matrix. `STRIPS` is private to the kernels that packed it."""

    ROWS = 0
    STRIPS = 1
