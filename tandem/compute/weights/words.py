"""Integers of a few bits packed into 32-bit words, as in GPTQ, AWQ and compressed-tensors: unpacking, and their codes
in memory.
"""

import math
from collections.abc import Callable

import torch

from tandem.compute.codes import TABLE_SIZE, CodedMatrix, CodeKind
from tandem.compute.weights.coded import CodedLayout
from tandem.core.errors import CorruptCheckpointError

WORD_BITS = 32
_BYTE_BITS, _HALF_BYTE_BITS = 8, 4
_PIECE_ELEMENTS = 1 << 20  # elements that are unpacked at a time


def num_words(count: int, bits: int) -> int:
    """Number of words for `count` integers."""
    return -(-count * bits // WORD_BITS)


def aligned(bits: int) -> tuple[int, int]:
    """The smallest number of integers that fills whole words, and the number of these words."""
    common = math.gcd(bits, WORD_BITS)
    return WORD_BITS // common, bits // common


def unpack_words(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Unpacks int32 [rows, words] into the first `count` integers of each row, uint8 [rows, count].

    Integer i has the bits from `i * bits` on in a row's stream, in which the lowest bits of a word come first. It may
    end in the next word, if `bits` does not divide 32.
    """
    first = torch.arange(count) * bits
    index, shift = first // WORD_BITS, first % WORD_BITS
    wide = words.long() & 0xFFFFFFFF
    found = wide[:, index] >> shift
    crossing = shift + bits > WORD_BITS
    if crossing.any():
        found[:, crossing] |= wide[:, index[crossing] + 1] << (WORD_BITS - shift[crossing])
    return (found & (1 << bits) - 1).to(torch.uint8)


def pack_half_bytes(codes: torch.Tensor) -> torch.Tensor:
    """Packs uint8 [rows, n] below 16 into [rows, ceil(n / 2)], the even ones in the lower half."""
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[:, ::2] | codes[:, 1::2] << _HALF_BYTE_BITS


def integer_kind(bits: int) -> CodeKind:
    """Kind of codes in memory for integers of `bits` bits."""
    return CodeKind.TABLE4 if bits <= _HALF_BYTE_BITS else CodeKind.INT8


def integer_table(bits: int) -> torch.Tensor | None:
    """Numbers of the codes, float32 [16]: the stored integer minus half its range, `2 ** (bits - 1)`. None = the codes
    are the numbers.
    """
    return None if bits > _HALF_BYTE_BITS else torch.arange(TABLE_SIZE, dtype=torch.float32) - (1 << bits - 1)


def integer_codes(rows: Callable[[int, int], torch.Tensor], shape: tuple[int, int], bits: int) -> torch.Tensor:
    """The codes of a matrix, of kind `integer_kind`.

    Args:
        rows: returns rows start to stop - 1 of stored integers, uint8 [stop - start, in].
        shape: (out, in).
    """
    outputs, inputs = shape
    is_table = integer_kind(bits) is CodeKind.TABLE4
    codes = (
        torch.empty(outputs, -(-inputs // 2), dtype=torch.uint8) if is_table else torch.empty(shape, dtype=torch.int8)
    )
    step = max(1, _PIECE_ELEMENTS // inputs)
    for start in range(0, outputs, step):
        stop = min(start + step, outputs)
        stored = rows(start, stop)
        codes[start:stop] = pack_half_bytes(stored) if is_table else (stored.short() - (1 << bits - 1)).to(torch.int8)
    return codes


def word_codes(
    words: torch.Tensor, shape: tuple[int, int], bits: int, permutation: torch.Tensor | None = None
) -> torch.Tensor:
    """As `integer_codes`, for integers packed along the inputs: int32 [out, words]. 4-bit integers that fill whole
    words and are not permuted are used as they are.

    `permutation`: the new order of inputs.
    """
    is_filled = words.shape[1] * WORD_BITS == bits * shape[1] and words.is_contiguous()
    if bits == _HALF_BYTE_BITS and is_filled and permutation is None:
        return words.flatten().view(torch.uint8).view(len(words), -1)  # NOTE: a single column may have any stride

    def rows(start: int, stop: int) -> torch.Tensor:
        found = unpack_words(words[start:stop], bits, shape[1])
        return found if permutation is None else found[:, permutation]

    return integer_codes(rows, shape, bits)


def sorted_groups(name: str, groups: torch.Tensor, group_size: int) -> torch.Tensor:
    """Order of inputs, int64 [in], in which each group is contiguous, from the group of each input [in].

    Raises:
        CorruptCheckpointError: a group does not exist, or has another size; `name` is the tensor's, for the message.
    """
    inputs = groups.shape[0]
    order = torch.argsort(groups.long(), stable=True)
    expected = torch.arange(inputs) // group_size
    if not torch.equal(groups.long()[order], expected):
        raise CorruptCheckpointError(
            f"{name} has groups from {int(groups.min())} to {int(groups.max())}, {int(expected[-1]) + 1} of "
            f"{group_size} inputs each are expected; download the weights again"
        )
    return order


def integer_matrix(
    layout: CodedLayout,
    bits: int,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    permutation: torch.Tensor | None = None,
) -> CodedMatrix:
    """Matrix of numbers `scale * (stored - zero)`. `zeros`: uint8 as stored, [out, groups]; None = half the range."""
    offsets = None if zeros is None else scales.float() * ((1 << bits - 1) - zeros.float())
    return CodedMatrix(
        kind=layout.kind,
        shape=layout.shape,
        codes=codes,
        scales=scales,
        group_size=layout.group_size,
        table=integer_table(bits),
        offsets=offsets,
        permutation=permutation,
    )
