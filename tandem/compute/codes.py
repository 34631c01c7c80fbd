"""Quantised matrices: codes with scales, the one form in memory into which all published formats are read.

`CodedMatrix.decode` is the definition against which every kernel is tested. The codes of a whole matrix are only
widened when one is decoded.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Final

import torch

from tandem.compute.order import Order

TABLE_SIZE: Final = 16  # numbers in a table of 4-bit codes
SUM_BLOCK: Final = 128
"""Inputs whose products the compiled kernels add up in order, from zero; blocks of them are added in a tree."""
SCALE_DTYPES: Final = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
    torch.int8,
)
OFFSET_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.int8)  # int8 = multiples of `super_offsets`
SUPER_DTYPE: Final = torch.float16  # of the units of int8 scales and offsets


class CodeKind(IntEnum):
    """Meaning of a code, the stored form of one quantised number.

    `TABLE4`: 4 bits, an index into a table of 16 numbers; two in a byte, the even input's in the lower half. `INT8`: a
    signed byte, the number itself. `E4M3`: a float of 8 bits, torch's float8_e4m3fn.
    """

    TABLE4 = 0
    INT8 = 1
    E4M3 = 2


CODE_DTYPES: Final = {
    CodeKind.TABLE4: torch.uint8,
    CodeKind.INT8: torch.int8,
    CodeKind.E4M3: torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedMatrix:
    """A quantised matrix [out, in]: each number is `factor * scale * number(code) + offset`. A scale and an offset
    belong to `group_size` consecutive inputs of one output; the last group of a row may be smaller.

    Scales and offsets may be small integers, as in GGUF's super-blocks: then they are multiples of numbers that belong
    to `super_size` inputs.

    Args:
        kind: meaning of the codes.
        shape: (out, in), of the numbers.
        codes: uint8 [out, ceil(in / 2)] of `TABLE4`, else int8 or float8_e4m3fn [out, in].
        scales: [out, ceil(in / group_size)] of one of `SCALE_DTYPES`.
        group_size: inputs; a scale for a whole row is one group of `in`.
        table: float32 [16] of `TABLE4`, else None.
        offsets: shape of `scales`, one of `OFFSET_DTYPES`: a zero point z is the offset `-factor * scale * z`.
        super_scales, super_offsets: float16 [out, ceil(in / super_size)], the units of scales and offsets that are
            int8.
        super_size: inputs, a multiple of `group_size`; 0 = no super-blocks.
        factor: multiplies all scales.
        permutation: int64 [in]; codes are in another order than inputs, so `x[:, permutation]` is multiplied.
        rounds_rows: rows are rounded to 8 bits before they are multiplied, see `rounded_rows.round_rows`; only if
            `has_integers`.
        order: order in memory. With `STRIPS`, codes, scales and offsets have a layout private to the kernels.
    """

    kind: CodeKind
    shape: tuple[int, int]
    codes: torch.Tensor
    scales: torch.Tensor
    group_size: int
    table: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    super_scales: torch.Tensor | None = None
    super_offsets: torch.Tensor | None = None
    super_size: int = 0
    factor: float = 1.0
    permutation: torch.Tensor | None = None
    rounds_rows: bool = False
    order: Order = Order.ROWS

    def __post_init__(self) -> None:
        outputs, inputs = self.shape
        assert self.codes.dtype == CODE_DTYPES[self.kind], self.codes.dtype
        assert (self.table is not None) == (self.kind is CodeKind.TABLE4)
        assert self.table is None or (self.table.shape == (TABLE_SIZE,) and self.table.dtype == torch.float32)
        assert self.scales.dtype in SCALE_DTYPES, self.scales.dtype
        assert self.offsets is None or self.offsets.dtype in OFFSET_DTYPES, self.offsets.dtype
        assert self.permutation is None or self.permutation.shape == (inputs,)
        assert self.group_size > 0
        for integers, numbers in ((self.scales, self.super_scales), (self.offsets, self.super_offsets)):
            assert (numbers is not None) == (integers is not None and integers.dtype == torch.int8)
            assert numbers is None or numbers.dtype == SUPER_DTYPE, numbers.dtype
        assert (self.super_scales is None and self.super_offsets is None) == (self.super_size == 0)
        assert self.super_size % self.group_size == 0
        if self.order is Order.ROWS:
            width = -(-inputs // 2) if self.kind is CodeKind.TABLE4 else inputs
            assert self.codes.shape == (outputs, width), self.codes.shape
            assert self.scales.shape == (outputs, self.num_groups), self.scales.shape
            assert self.offsets is None or self.offsets.shape == self.scales.shape, self.offsets.shape
            for numbers in (self.super_scales, self.super_offsets):
                assert numbers is None or numbers.shape == (outputs, self.num_supers), numbers.shape

    @property
    def num_groups(self) -> int:
        """Number of groups in a row."""
        return -(-self.shape[1] // self.group_size)

    @property
    def num_supers(self) -> int:
        """Number of super-blocks in a row."""
        return -(-self.shape[1] // self.super_size) if self.super_size else 0

    @property
    def segment_size(self) -> int:
        """Number of inputs whose products are added before a scale is applied: a group, or a part of a longer one."""
        return min(self.group_size, SUM_BLOCK)

    @property
    def has_integers(self) -> bool:
        """Whether the numbers without their scale are signed bytes, or those of a table times a power of two."""
        if self.table is None:
            return self.kind is CodeKind.INT8
        scaled = self.table * 2.0 ** torch.arange(8)[:, None]
        return bool(((scaled == scaled.round()) & (scaled >= -128) & (scaled <= 127)).all(dim=1).any())

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        return sum(tensor.nbytes for _, tensor in self.tensors())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that are present, by the names of its fields."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor):
                yield field.name, value

    def decode(self, dtype: torch.dtype = torch.float32, *, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows `start:stop` of the numbers, inputs in original order; computed in float32, rounded once to `dtype`."""
        return self.decode_rows(slice(start, stop), dtype)

    def decode_rows(self, rows: slice | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """As `decode`, of any rows: a slice, or their indices as an int64 tensor."""
        assert self.order is Order.ROWS, "the kernels that packed a matrix know where its rows are"
        numbers = self._numbers(self.codes[rows])
        numbers *= self._by_input(self.scales[rows], None if self.super_scales is None else self.super_scales[rows])
        if self.offsets is not None:
            supers = None if self.super_offsets is None else self.super_offsets[rows]
            numbers += self._by_input(self.offsets[rows], supers, factor=1.0)
        if self.permutation is not None:
            numbers = torch.empty_like(numbers).index_copy_(1, self.permutation, numbers)
        return numbers.to(dtype)

    def _by_input(
        self, values: torch.Tensor, supers: torch.Tensor | None, *, factor: float | None = None
    ) -> torch.Tensor:
        """Repeats values [rows, groups] for each input: float32 [rows, in]."""
        wide = values.float()
        if supers is not None:
            wide = wide * _repeated(supers.float(), self.super_size // self.group_size, wide.shape[1])
        return _repeated(wide * (self.factor if factor is None else factor), self.group_size, self.shape[1])

    def _numbers(self, codes: torch.Tensor) -> torch.Tensor:
        """Numbers of the codes without scales, float32 [rows, in]."""
        if self.table is None:
            return codes.float()
        indices = torch.stack((codes & 0x0F, codes >> 4), dim=-1).flatten(1)[:, : self.shape[1]]
        return self.table[indices.int()]


def _repeated(values: torch.Tensor, times: int, size: int) -> torch.Tensor:
    """[rows, n] -> [rows, size], each value repeated `times` times."""
    return values.repeat_interleave(times, dim=1)[:, :size]
