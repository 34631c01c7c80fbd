"""Token ids packed in 32 bits each, from tokenizer to engine: long prompts are copied as bytes, not id by id."""

from array import array
from collections.abc import Sequence


def packed(ids: Sequence[int]) -> "array[int]":
    """`ids` as unsigned 32-bit integers; themselves if they are so already, and then not to be modified.

    Raises:
        OverflowError: an id does not fit.
        TypeError: an id is no integer.
    """
    return ids if isinstance(ids, array) and ids.typecode == "I" else array("I", ids)


def joined(ids: Sequence[int], more: Sequence[int]) -> "array[int]":
    """`ids` and `more`, packed; not to be modified. Raises OverflowError or TypeError as `packed` does."""
    return packed(ids) + packed(more) if more else packed(ids)
