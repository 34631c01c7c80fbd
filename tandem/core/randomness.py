"""The only source of randomness in sampling: a hash of (request seed, position), so a draw can be repeated anywhere.

Invariant: the same seed and position give the same number on every platform, process and batch. Nothing here keeps
state or reads the clock; changing a constant breaks every stream that moves between two workers.
"""

import hashlib

_MANTISSA_BITS = 53
_ALL_BITS = (1 << 64) - 1
_UNIFORM_DOMAIN = b"tandem.uniform"
_CHOICE_DOMAIN = b"tandem.choice"


def uniform(seed: int, position: int) -> float:
    """The uniform number in [0, 1) that decides output token `position` (0 = the first) of a request.

    The top 53 bits of BLAKE2b-64 (RFC 7693) over the little-endian signed 128-bit seed and unsigned 64-bit position.
    """
    return (_hash64(_UNIFORM_DOMAIN, seed, position) >> (64 - _MANTISSA_BITS)) * 2.0**-_MANTISSA_BITS


def derived_uniform(number: float) -> float:
    """Returns another uniform number in [0, 1) derived from `number`, for draws that need more than one.

    The top 53 bits of SplitMix64's output (Steele et al. 2014) for the 53 bits of the number before.
    """
    mixed = (int(number * 2.0**_MANTISSA_BITS) + 0x9E3779B97F4A7C15) & _ALL_BITS
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _ALL_BITS
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _ALL_BITS
    return ((mixed ^ (mixed >> 31)) >> (64 - _MANTISSA_BITS)) * 2.0**-_MANTISSA_BITS


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of a request's `n` choices; the first keeps the request's own seed."""
    return seed if choice == 0 else _hash64(_CHOICE_DOMAIN, seed, choice)


def _hash64(domain: bytes, seed: int, index: int) -> int:
    message = seed.to_bytes(16, "little", signed=True) + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(message, digest_size=8, person=domain).digest(), "little")
