"""8-bit quantised weights, integers or floats, in a tensor of the weight's own shape, with scales of any granularity.

Used for fp8 checkpoints (`weight` float8_e4m3fn and `weight_scale_inv`, which multiplies: DeepSeek-V3,
arXiv:2412.19437, 3.3), compressed-tensors' "float-quantized", "int-quantized" and "naive-quantized", ModelOpt's FP8,
MXFP8 (OCP Microscaling Formats 1.0: blocks of 32 with a power of two). Blocks at the edges are smaller, so there are
ceil(out / rows) times ceil(in / columns) of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tandem.architecture.tensors import TensorSpec
from tandem.compute.codes import CODE_DTYPES, CodedMatrix, CodeKind
from tandem.compute.weights.base import StoredTensors
from tandem.compute.weights.coded import CodedLayout
from tandem.compute.weights.parts import (
    FLOATS,
    check_scales,
    part_name,
    part_spec,
    scalar,
    shared_row_span,
    tensor_name,
)

_SCALES = (*FLOATS, "float8_e8m0fnu", "uint8")
_POWERS = ("float8_e8m0fnu", "uint8")  # dtypes of powers of two, stored as exponent + 127
_NAMES = {CodeKind.INT8: "int8", CodeKind.E4M3: "fp8"}


@dataclass(frozen=True, slots=True)
class Blocks:
    """Numbers of outputs and inputs that share a scale; None = all."""

    rows: int | None
    columns: int | None

    @property
    def is_one(self) -> bool:
        """Whether the whole tensor is one block."""
        return self.rows is None and self.columns is None

    def __str__(self) -> str:
        return f"{self.rows or 'all'}x{self.columns or 'all'}"


TENSOR, CHANNELS = Blocks(None, None), Blocks(1, None)  # one scale for the tensor, or one for each output


@dataclass(frozen=True, slots=True)
class PlainCodes:
    """Implements `coded.Coding`: names the stored tensors of a weight and reads them into a `CodedMatrix`.

    Args:
        scale: suffix of the tensor of scales.
        has_zeros: whether each scale has a zero point, in `weight_zero_point`.
    """

    kind: CodeKind
    blocks: Blocks
    scale: str
    stored: StoredTensors | None  # None = the checkpoint is not open
    has_zeros: bool = False

    @property
    def name(self) -> str:
        return f"{_NAMES[self.kind]}-{self.blocks}{'-zeros' if self.has_zeros else ''}"

    def checkpoint_tensors(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        codes = str(CODE_DTYPES[self.kind]).removeprefix("torch.")
        found = [part_spec(weight, "weight", weight.shape, (codes,), self.stored)]
        if self.blocks.is_one:
            return (*found, scalar(weight, self.scale, self.stored))
        rows, shape = self._rows(weight), self._scales_shape(weight)
        found.append(part_spec(weight, self.scale, shape, _SCALES, self.stored, rows=rows, can_share=True))
        if self.has_zeros:
            dtypes = ("int8", "uint8")
            found.append(part_spec(weight, "weight_zero_point", shape, dtypes, self.stored, rows=rows, can_share=True))
        return tuple(found)

    def fits(self, weight: TensorSpec, scales: tuple[int, ...]) -> bool:
        """Whether scales of that shape can belong to the weight, or to a fused weight that it is part of."""
        if self.blocks.is_one:
            return torch.Size(scales).numel() == 1
        found = (self.stored or {}).get(tensor_name(weight, "weight"))
        *stack, outputs, _ = weight.shape if found is None else found.shape
        return scales == (*stack, -(-outputs // self._rows(weight)), -(-weight.shape[1] // self._columns(weight)))

    def layout(self, weight: TensorSpec) -> CodedLayout:
        outputs, inputs = weight.shape
        stored = str(self.checkpoint_tensors(weight)[1].code_dtype)
        dtype: torch.dtype = getattr(torch, "float8_e8m0fnu" if stored in _POWERS else stored)
        scales = torch.float32 if self.blocks.is_one else dtype
        offsets = torch.float32 if self.has_zeros else None
        return CodedLayout(self.kind, (outputs, inputs), self._columns(weight), scales, offsets)

    def read(self, weight: TensorSpec, parts: Mapping[str, torch.Tensor]) -> CodedMatrix:
        layout, scales = self.layout(weight), parts[part_name(weight, self.scale)]
        scales = scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales
        check_scales(tensor_name(weight, self.scale), scales)
        factor = 1.0
        if self.blocks.is_one:
            factor, scales = float(scales), torch.ones(layout.shape[0], 1)
        offsets = None
        if self.has_zeros:
            zeros = parts[part_name(weight, "weight_zero_point")]
            offsets = self._of_outputs(weight, -scales.float() * zeros.float())
        return CodedMatrix(
            kind=self.kind,
            shape=layout.shape,
            codes=parts[part_name(weight, "weight")],
            scales=self._of_outputs(weight, scales),
            group_size=layout.group_size,
            offsets=offsets,
            factor=factor,
        )

    def _of_outputs(self, weight: TensorSpec, scales: torch.Tensor) -> torch.Tensor:
        """Repeats scales [blocks, groups] for each output, [out, groups]."""
        rows, outputs = self._rows(weight), weight.shape[0]
        if rows == 1 or self.blocks.is_one:
            return scales
        _, others = shared_row_span(weight, rows)
        return (
            scales.view(torch.uint8 if scales.itemsize == 1 else scales.dtype)
            .repeat_interleave(rows, dim=0)[others : others + outputs]
            .view(scales.dtype)
        )

    def _rows(self, weight: TensorSpec) -> int:
        return weight.shape[0] if self.blocks.rows is None else self.blocks.rows

    def _columns(self, weight: TensorSpec) -> int:
        inputs = weight.shape[1]
        return inputs if self.blocks.columns is None else min(self.blocks.columns, inputs)

    def _scales_shape(self, weight: TensorSpec) -> tuple[int, int]:
        num_rows, _ = shared_row_span(weight, self._rows(weight))
        return num_rows, -(-weight.shape[1] // self._columns(weight))
