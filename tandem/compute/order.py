"""Orders in which the elements of a matrix lie in its memory."""

from enum import IntEnum


class Order(IntEnum):
    """Only the kernels that packed a matrix read `STRIPS`."""

    ROWS = 0
    STRIPS = 1
