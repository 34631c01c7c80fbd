"""Orders in which the elements of a matrix lie in its memory."""

from enum import IntEnum


class Order(IntEnum):
    """Storage order of a matrix. `STRIPS` is private to the kernels that packed it."""

    ROWS = 0
    STRIPS = 1
