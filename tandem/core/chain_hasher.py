"""Computes block hashes of prompts, with a cache for prefixes that recent prompts share. Used by routers.

Results equal those of `core.hashing`. The cache holds *stretches* of 32 blocks. A stretch is looked up by the hash
before it and by its last block, and its tokens are then compared, which takes half the time of hashing them as a
dictionary key. The hash before it covers model, scope and all earlier tokens, so timing does not reveal the prompts of
other tenants. Of stretches that differ before their last block only, the latest is kept.
"""

from array import array
from collections.abc import Sequence

from tandem.core.errors import InvalidRequestError
from tandem.core.hashing import extend_hashes
from tandem.core.token_ids import packed

BLOCKS_PER_STRETCH = 32  # that one entry of the cache covers
TOKEN_BYTES = 4  # of a packed token id
DEFAULT_MAX_STRETCHES = 8192  # NOTE: of 512 tokens each where blocks have 16; about 4.7 kB each

Stretch = tuple[bytes, list[bytes]]
"""Its tokens, 32 bits each, and the hashes of its blocks."""


class ChainHasher:
    """Computes block hashes and caches about `max_stretches` stretches. Used by one thread.

    `num_hashed`: blocks whose hashes were computed, as they were not known.
    """

    def __init__(self, max_stretches: int = DEFAULT_MAX_STRETCHES) -> None:
        self._half = max(1, max_stretches // 2)
        self._young: dict[tuple[bytes, bytes], Stretch] = {}
        self._old: dict[tuple[bytes, bytes], Stretch] = {}
        self.num_hashed = 0

    def __len__(self) -> int:
        """Number of cached stretches."""
        return len(self._young) + len(self._old)

    def hashes(self, root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
        """Returns the hashes of a prompt's full blocks, which the caller may extend. `root`: parent of the first.

        Raises:
            InvalidRequestError: a token id is out of range.
        """
        parent, hashes = root, list[bytes]()
        tokens = _packed(token_ids).tobytes()
        for start in range(0, len(tokens), BLOCKS_PER_STRETCH * TOKEN_BYTES * block_size):
            hashes += self._stretch(parent, tokens, start, block_size)
            if hashes:
                parent = hashes[-1]
        return hashes

    def _stretch(self, parent: bytes, tokens: bytes, start: int, block_size: int) -> list[bytes]:
        """Returns the hashes of a stretch's blocks after `parent`. A prompt's last, shorter stretch is not cached."""
        end = start + BLOCKS_PER_STRETCH * TOKEN_BYTES * block_size
        if end > len(tokens):
            return self._hashed(parent, tokens[start:], block_size)
        key = (parent, tokens[end - TOKEN_BYTES * block_size : end])
        found = self._young.get(key)
        if found is None or not tokens.startswith(found[0], start):
            found = self._old.pop(key, None)
            if found is None or not tokens.startswith(found[0], start):
                found = tokens[start:end], self._hashed(parent, tokens[start:end], block_size)
            if len(self._young) >= self._half:
                self._old, self._young = self._young, {}
            self._young[key] = found
        return found[1]

    def _hashed(self, parent: bytes, tokens: bytes, block_size: int) -> list[bytes]:
        hashes: list[bytes] = []
        extend_hashes(parent, hashes, array("I", tokens), block_size)
        self.num_hashed += len(hashes)
        return hashes


def _packed(token_ids: Sequence[int]) -> "array[int]":
    try:
        return packed(token_ids)
    except OverflowError as error:
        raise InvalidRequestError(f"a token id does not fit 32 bits ({error})") from error
