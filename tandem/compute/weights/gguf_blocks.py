"""GGUF's quantised blocks, read into codes with scales without rounding.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. A block has 32 numbers and a float16 scale, or
256 in groups of 16 or 32 whose scales are small integers times one of the block's. Numbers of 2 and 3 bits become 4-bit
codes, those of 5 and 6 bits become 8-bit codes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from tandem.architecture.tensors import TensorSpec
from tandem.compute.codes import TABLE_SIZE, CodedMatrix, CodeKind
from tandem.compute.weights.base import StoredTensors
from tandem.compute.weights.coded import CodedLayout
from tandem.compute.weights.four_bit_floats import e2m1_table
from tandem.compute.weights.parts import part_spec, source_of
from tandem.core.errors import CorruptCheckpointError

_PIECE_BYTES = 1 << 20  # of blocks that are decoded at once
_BLOCK, _SUPER_BLOCK = 32, 256
_NIBBLES, _PAIRS, _BITS = (0, 4), (0, 2, 4, 6), tuple(range(8))
_NAN_EXPONENT = 255
_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

Parts = Mapping[str, torch.Tensor]
"""Of a piece of rows, by the names of `CodedMatrix`; codes are one to a byte, uint8 or int8 [rows, in]."""


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Rows of blocks as bytes. `stored`: uint8 [rows, blocks, bytes of a block]."""

    stored: torch.Tensor

    def halves(self, at: int) -> torch.Tensor:
        """The float16 at byte `at` of each block. # [rows, blocks]"""
        return self.stored[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)

    def bits(self, start: int, stop: int, chunk: int, shifts: tuple[int, ...], mask: int) -> torch.Tensor:
        """From bytes `start` to `stop - 1`, in chunks of `chunk` bytes, the masked bits at each of the shifts. # uint8
        [rows, blocks, numbers]
        """
        found = self.stored[..., start:stop].reshape(*self.stored.shape[:-1], -1, 1, chunk)
        return ((found >> self._shifts(shifts)[:, None]) & mask).flatten(-3)

    def fifth_bits(self, start: int) -> torch.Tensor:
        """Fifth bits in four bytes, bit i for number i, as 16 or 0. # uint8 [rows, blocks, 32]"""
        found = self.stored[..., start : start + 4, None] >> self._shifts(_BITS)
        return (found & 1).flatten(-2) << 4

    def six_bit_scales(self, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and minima of Q4_K and Q5_K, packed in 12 bytes. # uint8 [rows, blocks, 8]"""
        first, second, both = self.stored[..., start : start + 12].reshape(*self.stored.shape[:-1], 3, 4).unbind(-2)
        high = [(values >> 2) & 0x30 for values in (first, second)]
        scales = torch.cat((first & 0x3F, (both & 0x0F) | high[0]), dim=-1)
        return scales, torch.cat((second & 0x3F, (both >> 4) | high[1]), dim=-1)

    def _shifts(self, shifts: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(shifts, dtype=torch.uint8, device=self.stored.device)


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of GGUF blocks.

    Args:
        size, num_bytes: numbers in a block, and its bytes.
        read: decodes blocks into the tensors of a `CodedMatrix`.
        group_size: numbers that share a scale.
        table: numbers of 4-bit codes; None = codes are 8-bit integers.
        has_offsets: whether each scale has a minimum beside it.
        scales: dtype of the scales; int8 = multiples of a number of the block.
    """

    size: int
    num_bytes: int
    read: Callable[[BlockRows], Parts]
    group_size: int = _BLOCK
    table: tuple[float, ...] | None = None
    has_offsets: bool = False
    scales: torch.dtype = torch.float16

    @property
    def kind(self) -> CodeKind:
        return CodeKind.INT8 if self.table is None else CodeKind.TABLE4


def _four_bits(start: int) -> Callable[[BlockRows], Parts]:
    def read(blocks: BlockRows) -> Parts:
        codes = blocks.bits(start, start + 16, 16, _NIBBLES, 15)
        return {"codes": codes, "scales": blocks.halves(0)} | ({"offsets": blocks.halves(2)} if start == 4 else {})

    return read


def _q5_0(blocks: BlockRows) -> Parts:
    codes = blocks.bits(6, 22, 16, _NIBBLES, 15) | blocks.fifth_bits(2)
    return {"codes": codes.view(torch.int8) - 16, "scales": blocks.halves(0)}


def _q5_1(blocks: BlockRows) -> Parts:
    codes = blocks.bits(8, 24, 16, _NIBBLES, 15) | blocks.fifth_bits(4)
    return {"codes": codes, "scales": blocks.halves(0), "offsets": blocks.halves(2)}


def _q8_0(blocks: BlockRows) -> Parts:
    return {"codes": blocks.stored[..., 2:], "scales": blocks.halves(0)}


def _mxfp4(blocks: BlockRows) -> Parts:
    return {"codes": blocks.bits(1, 17, 16, _NIBBLES, 15), "scales": blocks.stored[..., 0]}


def _with_minima(
    codes: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor, blocks: BlockRows, at: int
) -> dict[str, torch.Tensor]:
    """`at`: position of the block's scale, and of its minimum, which is subtracted."""
    supers = {"super_scales": blocks.halves(at), "super_offsets": -blocks.halves(at + 2)}
    return {"codes": codes, "scales": scales, "offsets": minima, **supers}


def _q2_k(blocks: BlockRows) -> Parts:
    packed = blocks.stored[..., :16]
    return _with_minima(blocks.bits(16, 80, 32, _PAIRS, 3), packed & 15, packed >> 4, blocks, 80)


def _q3_k(blocks: BlockRows) -> Parts:
    high = blocks.bits(0, 32, 32, _BITS, 1) << 2  # NOTE: 4 where the number is not negative
    codes = (blocks.bits(32, 96, 32, _PAIRS, 3) | high) + 4
    scales = blocks.bits(96, 104, 8, _NIBBLES, 15) | blocks.bits(104, 108, 4, _PAIRS, 3) << 4
    return {"codes": codes, "scales": scales.view(torch.int8) - 32, "super_scales": blocks.halves(108)}


def _q4_k(blocks: BlockRows) -> Parts:
    return _with_minima(blocks.bits(16, 144, 32, _NIBBLES, 15), *blocks.six_bit_scales(4), blocks, 0)


def _q5_k(blocks: BlockRows) -> Parts:
    codes = blocks.bits(48, 176, 32, _NIBBLES, 15) | blocks.bits(16, 48, 32, _BITS, 1) << 4
    return _with_minima(codes, *blocks.six_bit_scales(4), blocks, 0)


def _q6_k(blocks: BlockRows) -> Parts:
    codes = blocks.bits(0, 128, 64, _NIBBLES, 15) | blocks.bits(128, 192, 32, _PAIRS, 3) << 4
    scales = blocks.stored[..., 192:208]
    return {"codes": codes.view(torch.int8) - 32, "scales": scales, "super_scales": blocks.halves(208)}


_SIGNED, _UNSIGNED = tuple(float(n) for n in range(-8, 8)), tuple(float(n) for n in range(16))

TYPES: Final[Mapping[str, BlockType]] = {
    "Q4_0": BlockType(_BLOCK, 18, _four_bits(2), table=_SIGNED),
    "Q4_1": BlockType(_BLOCK, 20, _four_bits(4), table=_UNSIGNED, has_offsets=True),
    "Q5_0": BlockType(_BLOCK, 22, _q5_0),
    "Q5_1": BlockType(_BLOCK, 24, _q5_1, has_offsets=True),
    "Q8_0": BlockType(_BLOCK, 34, _q8_0),
    "Q2_K": BlockType(_SUPER_BLOCK, 84, _q2_k, 16, _UNSIGNED, has_offsets=True, scales=torch.int8),
    "Q3_K": BlockType(_SUPER_BLOCK, 110, _q3_k, 16, _SIGNED, scales=torch.int8),
    "Q4_K": BlockType(_SUPER_BLOCK, 144, _q4_k, 32, _UNSIGNED, has_offsets=True, scales=torch.int8),
    "Q5_K": BlockType(_SUPER_BLOCK, 176, _q5_k, 32, has_offsets=True, scales=torch.int8),
    "Q6_K": BlockType(_SUPER_BLOCK, 210, _q6_k, 16, scales=torch.int8),
    "IQ4_NL": BlockType(_BLOCK, 18, _four_bits(2), table=tuple(float(n) for n in _IQ4_NL)),
    "MXFP4": BlockType(_BLOCK, 17, _mxfp4, table=tuple(e2m1_table().tolist()), scales=torch.float8_e8m0fnu),
}


@dataclass(frozen=True, slots=True)
class GgufBlocks:
    """Implements `coded.Coding`: one tensor with rows of blocks as in the GGUF file."""

    type_name: str
    stored: StoredTensors | None  # None = the checkpoint is not open

    @property
    def name(self) -> str:
        return f"gguf-{self.type_name}"

    @property
    def _type(self) -> BlockType:
        return TYPES[self.type_name]

    def checkpoint_tensors(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        (outputs, inputs), size = weight.shape, self._type.size
        if inputs % size:
            raise CorruptCheckpointError(
                f"{source_of(weight).tensor} has rows of {inputs} numbers, which are not made of "
                f"{self.type_name}'s blocks of {size}; convert or download the model again"
            )
        row_bytes = inputs // size * self._type.num_bytes
        return (part_spec(weight, "weight", (outputs, row_bytes), ("uint8",), self.stored),)

    def layout(self, weight: TensorSpec) -> CodedLayout:
        outputs, inputs = weight.shape
        found = self._type
        return CodedLayout(
            found.kind,
            (outputs, inputs),
            found.group_size,
            found.scales,
            found.scales if found.has_offsets else None,
            super_size=found.size if found.scales == torch.int8 else 0,
        )

    def read(self, weight: TensorSpec, parts: Mapping[str, torch.Tensor]) -> CodedMatrix:
        layout, found = self.layout(weight), self._type
        rows = parts[weight.name]
        tensors = {  # NOTE: `empty_like` of a tensor without numbers imports SymPy, which takes 40 MiB and a second
            name: torch.empty(x.shape, dtype=x.dtype, device=rows.device) for name, x in layout.sketch().tensors()
        }
        if found.table is not None:
            assert len(found.table) == TABLE_SIZE
            tensors["table"].copy_(torch.tensor(found.table))
        step = max(1, _PIECE_BYTES // rows.shape[1])
        for start in range(0, len(rows), step):
            piece = BlockRows(rows[start : start + step].reshape(-1, rows.shape[1] // found.num_bytes, found.num_bytes))
            for name, values in found.read(piece).items():
                values = values.flatten(1)
                if name == "codes" and found.kind is CodeKind.TABLE4:
                    values = values[:, 0::2] | values[:, 1::2] << 4
                into = tensors[name][start : start + step]
                into.copy_(values.view(into.dtype) if values.itemsize == 1 else values)
        self._check(weight, tensors)
        return CodedMatrix(
            kind=layout.kind,
            shape=layout.shape,
            codes=tensors["codes"],
            scales=tensors["scales"],
            group_size=layout.group_size,
            table=tensors.get("table"),
            offsets=tensors.get("offsets"),
            super_scales=tensors.get("super_scales"),
            super_offsets=tensors.get("super_offsets"),
            super_size=layout.super_size,
        )

    def _check(self, weight: TensorSpec, tensors: Mapping[str, torch.Tensor]) -> None:
        """Checks that every number is finite. Integers and codes always are, so only scales matter."""
        for name in ("scales", "offsets", "super_scales", "super_offsets"):
            values = tensors.get(name)
            if values is None or values.dtype == torch.int8:
                continue
            is_power = values.dtype == torch.float8_e8m0fnu
            is_finite = values.view(torch.uint8) != _NAN_EXPONENT if is_power else values.isfinite()
            if not is_finite.all():
                row = source_of(weight).start + int((~is_finite).any(dim=1).int().argmax())
                raise CorruptCheckpointError(
                    f"{source_of(weight).tensor}: row {row} has values that are infinite or no numbers: a scale of its "
                    f"{self.type_name} blocks is damaged; download the file again"
                )
