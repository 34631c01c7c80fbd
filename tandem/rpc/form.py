"""A form: the conversion of a value to its protobuf message and back, with the checks that received values must pass.

Whatever bytes a peer sends, reading them gives a value or raises `InvalidRequestError` naming the field.
"""

import math
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from tandem.core.errors import InvalidRequestError, shown
from tandem.core.hashing import HASH_BYTES
from tandem.core.sampling_params import MAX_TOKEN_ID
from tandem.core.token_ids import packed
from tandem.locality.base import check_hashes

T = TypeVar("T")
W = TypeVar("W", bound=int)
TOKEN_BYTES = 4  # of each id in a long list


@dataclass(frozen=True, slots=True)
class Form(Generic[T]):
    """Conversion between a value and its protobuf message: `put` creates the message, `take` reads and checks it."""

    message_type: type[Message]
    put: Callable[[T], Message]
    take: Callable[[Any], T]

    def encode(self, value: T) -> bytes:
        """Encodes `value` as bytes.

        Raises:
            InvalidRequestError: the value has no form on the wire, as a negative count or text that is not Unicode.
        """
        try:
            return self.put(value).SerializeToString()
        except (ValueError, TypeError, OverflowError) as error:
            raise InvalidRequestError(f"{self.message_type.__name__} cannot be sent: {error}") from error

    def decode(self, data: bytes) -> T:
        """Decodes and checks a value.

        Raises:
            InvalidRequestError: it is not such a message, or holds nonsense.
        """
        try:
            message = self.message_type.FromString(data)
        except DecodeError as error:
            raise InvalidRequestError(
                f"{len(data)} bytes are not a {self.message_type.__name__} of this protocol: {error}"
            ) from error
        return self.take(message)


class Names(Generic[T, W]):
    """Conversion of an enum: our name for each number on the wire. Unknown names and numbers raise
    `InvalidRequestError`.

    Args:
        newer: name for a number that only a newer release can have sent; None: such numbers are refused like any
            unknown.
    """

    def __init__(self, field: str, numbers: Mapping[T, W], *, newer: T | None = None) -> None:
        self._field = field
        self._numbers = dict(numbers)
        self._words: dict[int, T] = {number: word for word, number in numbers.items()}
        self._newest = max(self._words)
        self._newer = newer

    def number(self, word: T) -> W:
        """The number to send for a name."""
        if word not in self._numbers:
            raise InvalidRequestError(f"{self._field}={shown(word)} is unknown; use one of {list(self._numbers)}")
        return self._numbers[word]

    def word(self, number: int) -> T:
        """The name of a received number."""
        if number not in self._words:
            if self._newer is not None and number > self._newest:
                return self._newer
            raise InvalidRequestError(f"{self._field}={number} is unknown; this side knows {sorted(self._words)}")
        return self._words[number]


def not_empty(field: str, value: str) -> str:
    """Returns `value`; raises `InvalidRequestError` naming the field if it is empty."""
    if not value:
        raise InvalidRequestError(f"{field} is empty; it needs at least one character")
    return value


def finite(field: str, value: float) -> float:
    """Returns `value`; raises `InvalidRequestError` naming the field if it is not finite."""
    if not math.isfinite(value):
        raise InvalidRequestError(f"{field}={value} must be a finite number")
    return value


def not_negative(field: str, value: float) -> float:
    """Returns `value`; raises `InvalidRequestError` naming the field if it is negative or not finite."""
    if not 0.0 <= value < math.inf:
        raise InvalidRequestError(f"{field}={value} must be a finite number of zero or more")
    return value


def token_id(field: str, value: int) -> int:
    """Returns `value`; raises `InvalidRequestError` naming the field if it is above `MAX_TOKEN_ID`."""
    if value > MAX_TOKEN_ID:
        raise InvalidRequestError(f"{field}={value} is not a token id; use 0 to {MAX_TOKEN_ID}")
    return value


def token_ids(field: str, values: Iterable[int]) -> tuple[int, ...]:
    """Returns a short list of token ids as a tuple; raises `InvalidRequestError` naming the field if one is invalid."""
    ids = tuple(values)
    if ids:
        token_id(field, max(ids))
    return ids


def pack_token_ids(ids: Sequence[int]) -> bytes:
    """Packs a long list of token ids, `TOKEN_BYTES` each, little-endian."""
    data = packed(ids)
    if sys.byteorder == "big":
        data = data[:]
        data.byteswap()
    return data.tobytes()


def unpack_token_ids(field: str, data: bytes) -> "array[int]":
    """Inverse of `pack_token_ids`; an array of unsigned 32-bit ids. Raises `InvalidRequestError` naming the field."""
    if len(data) % TOKEN_BYTES:
        raise InvalidRequestError(f"{field} has {len(data)} bytes; each token id takes {TOKEN_BYTES}")
    ids = array("I", data)
    if sys.byteorder == "big":
        ids.byteswap()
    if not data[TOKEN_BYTES - 1 :: TOKEN_BYTES].isascii():  # NOTE: a top byte of 128 or more; far faster than max
        token_id(field, max(ids))
    return ids


def pack_hashes(hashes: Sequence[bytes]) -> bytes:
    """Concatenates block hashes of `HASH_BYTES` each."""
    check_hashes(hashes)
    return b"".join(hashes)


def unpack_hashes(field: str, data: bytes) -> tuple[bytes, ...]:
    """Inverse of `pack_hashes`. Raises `InvalidRequestError` naming the field."""
    if len(data) % HASH_BYTES:
        raise InvalidRequestError(f"{field} has {len(data)} bytes; each block hash takes {HASH_BYTES}")
    return tuple(data[start : start + HASH_BYTES] for start in range(0, len(data), HASH_BYTES))
