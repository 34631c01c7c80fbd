"""Generates unpredictable numbers without a system call for each, which would take a tenth of a request's time."""

import hashlib
import itertools

from tandem.core.machine import random_bytes


class FreshNumbers:
    """Generator of unpredictable numbers: a keyed hash of a counter, with a random key per instance. Thread-safe."""

    def __init__(self) -> None:
        self._key = random_bytes(32)
        self._numbers = itertools.count()

    def bits(self, num_bits: int) -> int:
        """An integer of at most `num_bits` (512 or fewer) random bits."""
        assert 0 < num_bits <= 512
        number = next(self._numbers).to_bytes(16, "little")
        digest = hashlib.blake2b(number, key=self._key, digest_size=64).digest()
        return int.from_bytes(digest, "little") >> (512 - num_bits)

    def hex(self, num_characters: int) -> str:
        """A random number of that many hexadecimal digits."""
        return f"{self.bits(4 * num_characters):0{num_characters}x}"
