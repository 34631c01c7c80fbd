"""Inspection of KV page contents: CRC-32 checksums (ISO-HDLC, as in zlib) of parts of pages, and checks that numbers
are finite.

Workers use it on blocks that they lend or receive (`tandem.worker.checksums`). A checksum over parts that lie on
several hosts is combined from those of each host (`joined_crc32`).
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch

PagePart = tuple[int, int, int, int]
"""Rank, page of that rank, first byte there, and the byte after the last."""

_POLYNOMIAL = 0xEDB88320  # reflected: the highest bit is the coefficient of x to the power 0
_ONE = 1 << 31
_X8 = 1 << 23
_AT_ONCE = 64  # pages checked together, so few that their copies take little memory


@dataclass(frozen=True, slots=True)
class NumberParts:
    """Parts of one rank's pages that hold numbers of one type, bytes `start` to `end - 1` of each page."""

    rank: int
    pages: tuple[int, ...]
    start: int
    end: int
    dtype: str  # as PyTorch names it, such as "bfloat16"

    def first(self) -> PagePart:
        """The part in the first of the pages."""
        return self.rank, self.pages[0], self.start, self.end


class PageBytes(Protocol):
    """Inspects pages of all ranks, on any host. Only pages that are not being written may be inspected."""

    def crc32s(self, wanted: Sequence[Sequence[PagePart]]) -> list[int]:
        """For each list of parts, the checksum of their bytes concatenated.

        Raises:
            TransportError: pages of another host cannot be inspected.
        """
        ...

    def are_finite(self, wanted: Sequence[NumberParts]) -> list[bool]:
        """For each item, whether all its numbers are finite.

        Raises:
            TransportError: pages of another host cannot be inspected.
        """
        ...


class LocalPageBytes:
    """Implements `PageBytes` for pages in this process's memory: [num_ranks, num_blocks, page_bytes] uint8.

    Takes about a millisecond for each 2 MB and releases the interpreter lock.
    """

    def __init__(self, pages: torch.Tensor) -> None:
        self._pages = pages

    def crc32s(self, wanted: Sequence[Sequence[PagePart]]) -> list[int]:
        return [self._crc32(parts) for parts in wanted]

    def are_finite(self, wanted: Sequence[NumberParts]) -> list[bool]:
        return [self._are_finite(each) for each in wanted]

    def _crc32(self, parts: Sequence[PagePart]) -> int:
        value = 0
        for rank, page, start, end in parts:
            value = zlib.crc32(self._pages[rank, page, start:end].cpu().numpy().data, value)
        return value

    def _are_finite(self, each: NumberParts) -> bool:
        dtype: torch.dtype = getattr(torch, each.dtype)
        for first in range(0, len(each.pages), _AT_ONCE):
            pages = list(each.pages[first : first + _AT_ONCE])
            numbers = self._pages[each.rank][pages, each.start : each.end].view(dtype)
            if not all(math.isfinite(bound) for bound in torch.aminmax(numbers)):
                return False
        return True


def joined_crc32(first: int, second: int, num_bytes: int) -> int:
    """The checksum of two concatenated byte strings, from the checksum of each and the length of the second."""
    return _product(_power(num_bytes), first) ^ second


@lru_cache(maxsize=1024)
def _power(num_bytes: int) -> int:
    """x to the power 8 * num_bytes, modulo the polynomial."""
    result, square = _ONE, _X8
    while num_bytes:
        if num_bytes & 1:
            result = _product(result, square)
        square = _product(square, square)
        num_bytes >>= 1
    return result


def _product(a: int, b: int) -> int:
    """Product of two polynomials over GF(2), modulo the polynomial."""
    result = 0
    while a:
        if a & _ONE:
            result ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return result
