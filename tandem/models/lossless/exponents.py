"""Lossless compression of bfloat16 numbers: exponents are entropy-coded, signs and mantissas stay bytes.

Exponents of weights carry 2.5 to 2.7 of their 8 bits, and signs and mantissas are noise: DFloat11 (arXiv 2504.11651)
and ZipNN (arXiv 2411.05239). Exponents are a raw deflate stream (RFC 1951) without matches, which is Huffman coding by
blocks of some 32,000 of them. So zlib, which every Python has, is within 0.5 % of their entropy.
"""

import zlib
from typing import Final

import numpy as np
import numpy.typing as npt

CHUNK: Final = 1 << 17  # numbers compressed together in files written here
_RAW: Final = -zlib.MAX_WBITS
_LEVEL, _MEMORY_LEVEL = 6, 9  # NOTE: the level does nothing without matches

Words = npt.NDArray[np.uint16]  # the bits of bfloat16
Bytes = npt.NDArray[np.uint8]


class DamagedChunkError(ValueError):
    """A chunk was changed after it was written; the message names the difference."""


def encode(words: Words) -> tuple[Bytes, bytes, int]:
    """Compresses a chunk of numbers. Returns [n] bytes of sign and mantissa, the stream of exponents, and the CRC-32 of
    both.

    A byte of the former has the mantissa's seven bits above the sign.
    """
    rotated = (words << 1) | (words >> 15)
    exponents, rest = (rotated >> 8).astype(np.uint8), rotated.astype(np.uint8)
    coder = zlib.compressobj(_LEVEL, zlib.DEFLATED, _RAW, _MEMORY_LEVEL, zlib.Z_HUFFMAN_ONLY)
    return rest, coder.compress(exponents.data) + coder.flush(), _checksum(exponents, rest)


def decode(rest: Bytes, stream: Bytes, checksum: int) -> Words:
    """The numbers of a chunk, from the values that `encode` returned.

    Raises:
        DamagedChunkError: one of them was changed.
    """
    decoder = zlib.decompressobj(_RAW)
    try:
        content = decoder.decompress(stream.data, rest.size + 1)  # NOTE: whatever the stream says, no more is in memory
    except zlib.error as error:
        raise DamagedChunkError(f"no deflate stream ({error})") from error
    if len(content) != rest.size or not decoder.eof:
        raise DamagedChunkError("another number of exponents")
    exponents = np.frombuffer(content, np.uint8)
    if _checksum(exponents, rest) != checksum:
        raise DamagedChunkError("another checksum")
    words = exponents.astype(np.uint16)
    words <<= 8
    words |= rest
    signs = words << 15
    words >>= 1
    words |= signs
    return words


def _checksum(exponents: Bytes, rest: Bytes) -> int:
    return zlib.crc32(rest.data, zlib.crc32(exponents.data))
