"""Numbers of a linear map as codes with scales: the one form in memory that all published formats are read into.

`CodedMatrix.decode` is the definition that every kernel is tested against. Nothing here widens the codes of a whole
matrix unless it is asked to decode one.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import torch

from tandem.compute.order import Order

TABLE_SIZE: Final = 16
SCALE_DTYPES: Final = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
)
OFFSET_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


class CodeKind(IntEnum):
    """The meaning of a code.

    `TABLE4`: 4 bits, an index of a table of 16 numbers; two to a byte, that of the even input in the lower half.
    `INT8`: a signed byte, the number itself. `E4M3`: a float of 8 bits, torch's float8_e4m3fn.
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
    """A matrix [out, in] of numbers `factor * scale * number(code) + offset`; a scale and an offset belong to
    `group_size` inputs of one output, the last group of a row to what is left.

    Args:
        kind: meaning of the codes.
        shape: (out, in), of the numbers.
        codes: uint8 [out, ceil(in / 2)] of `TABLE4`, else int8 or float8_e4m3fn [out, in].
        scales: [out, ceil(in / group_size)] of one of `SCALE_DTYPES`.
        group_size: inputs; a scale for a whole row is one group of `in`.
        table: float32 [16] of `TABLE4`, else None.
        offsets: as `scales`, of one of `OFFSET_DTYPES`: a zero point z is the offset `-factor * scale * z`.
        factor: of all scales.
        permutation: int64 [in]; what is multiplied is `x[:, permutation]`: codes lie in another order than inputs.
        order: of what lies in memory. In `STRIPS`, codes, scales and offsets have a layout of the kernels' own.
    """

    kind: CodeKind
    shape: tuple[int, int]
    codes: torch.Tensor
    scales: torch.Tensor
    group_size: int
    table: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    factor: float = 1.0
    permutation: torch.Tensor | None = None
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
        if self.order is Order.ROWS:
            width = -(-inputs // 2) if self.kind is CodeKind.TABLE4 else inputs
            assert self.codes.shape == (outputs, width), self.codes.shape
            assert self.scales.shape == (outputs, self.num_groups), self.scales.shape
            assert self.offsets is None or self.offsets.shape == self.scales.shape, self.offsets.shape

    @property
    def num_groups(self) -> int:
        """Of each row."""
        return -(-self.shape[1] // self.group_size)

    @property
    def num_bytes(self) -> int:
        """In memory."""
        tensors = (self.codes, self.scales, self.table, self.offsets, self.permutation)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def decode(self, dtype: torch.dtype = torch.float32, *, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows `start:stop` of the numbers, inputs in their own order: computed in float32, rounded once to `dtype`."""
        assert self.order is Order.ROWS, "the kernels that packed a matrix know where its rows are"
        numbers = self._numbers(self.codes[start:stop])
        scales = _to_inputs(self.scales[start:stop].float() * self.factor, self.group_size, self.shape[1])
        numbers *= scales
        if self.offsets is not None:
            numbers += _to_inputs(self.offsets[start:stop].float(), self.group_size, self.shape[1])
        if self.permutation is not None:
            numbers = torch.empty_like(numbers).index_copy_(1, self.permutation, numbers)
        return numbers.to(dtype)

    def _numbers(self, codes: torch.Tensor) -> torch.Tensor:
        """float32 [rows, in], without scales."""
        if self.table is None:
            return codes.float()
        indices = torch.stack((codes & 0x0F, codes >> 4), dim=-1).flatten(1)[:, : self.shape[1]]
        return self.table[indices.int()]


def _to_inputs(values: torch.Tensor, group_size: int, inputs: int) -> torch.Tensor:
    """[rows, groups] -> [rows, inputs]."""
    return values.repeat_interleave(group_size, dim=1)[:, :inputs]
