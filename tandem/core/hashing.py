"""Block hashes, defined here only: blocks with equal hashes have interchangeable KV.

A block's hash covers everything its content depends on: the model's fingerprint, the layout of pages, the block size,
the request's cache scope and every token from the start of the request to the end of the block. SHA-256 keeps it
collision-resistant: a tenant who could forge a collision could read another's cache. Changing the encoding means
raising `HASH_VERSION`; changing what the bytes of a page mean, `LAYOUT_VERSION`.
"""

import hashlib
import struct
from array import array
from collections.abc import Sequence

from tandem.core.scope import CacheScope

HASH_VERSION = 2
LAYOUT_VERSION = 1
HASH_BYTES = 32  # of a block hash


def root_hash(scope: CacheScope, *, model_fingerprint: str, block_size: int) -> bytes:
    """The parent of a request's first block. Fields are length-prefixed, so no two tuples share an encoding."""
    digest = hashlib.sha256(f"tandem-block-hash-{HASH_VERSION}-{LAYOUT_VERSION}-{block_size}".encode())
    for field in (_text(model_fingerprint), scope.adapter or b"", _text(scope.salt)):
        digest.update(len(field).to_bytes(8, "little") + field)
    return digest.digest()


def extend_hashes(root: bytes, hashes: list[bytes], token_ids: Sequence[int], block_size: int) -> None:
    """Append to `hashes` the chained hash of every full block of `token_ids` it does not cover yet.

    Token ids are encoded as 32-bit integers in the machine's order, little-endian wherever we run.

    Raises:
        OverflowError: a token id does not fit.
    """
    first, last = len(hashes) * block_size, len(token_ids) // block_size * block_size
    if first >= last:
        return
    hashes += _chained(hashes[-1] if hashes else root, _encoded(token_ids[first:last]), block_size)


def resume_name(block_hash: bytes) -> bytes:
    """Name under which an index is told that a request can continue after this block: its hash with swapped halves."""
    return block_hash[HASH_BYTES // 2 :] + block_hash[: HASH_BYTES // 2]


def further_hashes(root: bytes, hashes: bytes, token_ids: "array[int]", block_size: int) -> bytes:
    """Hashes of the full blocks of `token_ids` beyond those that `hashes` covers; both packed, 32 bytes each."""
    first, last = len(hashes) // HASH_BYTES * block_size, len(token_ids) // block_size * block_size
    return b"".join(_chained(hashes[-HASH_BYTES:] or root, token_ids[first:last].tobytes(), block_size))


def _chained(parent: bytes, encoded: bytes, block_size: int) -> list[bytes]:
    hashes = []
    for start in range(0, len(encoded), 4 * block_size):
        parent = hashlib.sha256(parent + encoded[start : start + 4 * block_size]).digest()
        hashes.append(parent)
    return hashes


def _text(value: str) -> bytes:
    return value.encode("utf-8", "surrogatepass")


def _encoded(token_ids: Sequence[int]) -> bytes:
    if isinstance(token_ids, array) and token_ids.typecode in "iI":
        return token_ids.tobytes()
    try:
        return struct.pack(f"{len(token_ids)}i", *token_ids)  # NOTE: half the time of making an array
    except struct.error as error:
        raise OverflowError(f"a token id is no 32-bit integer: {error}") from error
