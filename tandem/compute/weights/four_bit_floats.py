"""4-bit floats (MXFP4 and NVFP4): two in a byte along the inputs, in blocks with a scale.

Codes are E2M1 (OCP Microscaling Formats 1.0, 5.3.3), the even input in the lower half of a byte. MXFP4 has blocks of 32
and powers of two as scales. NVFP4 has blocks of 16 and E4M3 scales, which one number for the whole tensor multiplies
(ModelOpt) or divides (compressed-tensors).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tandem.architecture.tensors import TensorSpec
from tandem.compute.codes import CodedMatrix, CodeKind
from tandem.compute.weights.base import StoredTensors
from tandem.compute.weights.coded import CodedLayout
from tandem.compute.weights.parts import check_scales, part_name, part_spec, scalar, tensor_name

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MX_BLOCK, NV_BLOCK = 32, 16  # inputs that share a scale
_MX_SCALES = ("float8_e8m0fnu", "uint8")
_NV_SCALES = ("float8_e4m3fn",)


def e2m1_table() -> torch.Tensor:
    """The 16 numbers of E2M1 codes, float32."""
    return torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)])


@dataclass(frozen=True, slots=True)
class FourBitFloats:
    """Implements `coded.Coding`: names the stored tensors of a weight and reads them into a `CodedMatrix`.

    Args:
        codes, scale: suffixes of the tensors of codes and scales.
        factor: suffix of NVFP4's number for the whole tensor; None = MXFP4.
        divides: whether that number divides the scales, not multiplies them.
        code_dtypes: possible dtypes of a byte with two codes.
    """

    codes: str
    scale: str
    stored: StoredTensors | None  # None = the checkpoint is not open
    factor: str | None = None
    divides: bool = False
    code_dtypes: tuple[str, ...] = ("uint8",)

    @property
    def name(self) -> str:
        return "mxfp4" if self.factor is None else f"nvfp4-{'divided' if self.divides else 'multiplied'}"

    @property
    def _block(self) -> int:
        return MX_BLOCK if self.factor is None else NV_BLOCK

    def checkpoint_tensors(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        outputs, inputs = weight.shape
        scales = _MX_SCALES if self.factor is None else _NV_SCALES
        shape = (outputs, -(-inputs // self._block))
        found = (
            part_spec(weight, self.codes, (outputs, -(-inputs // 2)), self.code_dtypes, self.stored),
            part_spec(weight, self.scale, shape, scales, self.stored),
        )
        return found if self.factor is None else (*found, scalar(weight, self.factor, self.stored))

    def layout(self, weight: TensorSpec) -> CodedLayout:
        outputs, inputs = weight.shape
        scales = torch.float8_e8m0fnu if self.factor is None else torch.float8_e4m3fn
        return CodedLayout(CodeKind.TABLE4, (outputs, inputs), self._block, scales)

    def read(self, weight: TensorSpec, parts: Mapping[str, torch.Tensor]) -> CodedMatrix:
        layout = self.layout(weight)
        scales = parts[part_name(weight, self.scale)].view(layout.scales)
        # NOTE: an E4M3 scale of a block of very small numbers is rounded to 0 by some writers
        check_scales(tensor_name(weight, self.scale), scales, can_be_zero=self.factor is not None)
        factor = 1.0
        if self.factor is not None:
            found = parts[part_name(weight, self.factor)]
            check_scales(tensor_name(weight, self.factor), found)
            factor = 1.0 / float(found) if self.divides else float(found)
        return CodedMatrix(
            kind=layout.kind,
            shape=layout.shape,
            codes=parts[part_name(weight, self.codes)].view(torch.uint8),
            scales=scales,
            group_size=layout.group_size,
            table=e2m1_table(),
            factor=factor,
        )


@dataclass(frozen=True, slots=True)
class ExpertBlocks:
    """Implements `coded.Coding`: gpt-oss's MXFP4, all experts of a layer in one tensor, outputs before inputs.

    `{name}_blocks` uint8 [experts, out, in / 32, 16] and `{name}_scales` uint8 [experts, out, in / 32].
    """

    stored: StoredTensors | None  # None = the checkpoint is not open

    @property
    def name(self) -> str:
        return "mxfp4-experts"

    def checkpoint_tensors(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        outputs, inputs = weight.shape
        blocks = -(-inputs // MX_BLOCK)
        return (
            part_spec(weight, "blocks", (outputs, blocks, MX_BLOCK // 2), ("uint8",), self.stored),
            part_spec(weight, "scales", (outputs, blocks), ("uint8",), self.stored),
        )

    def layout(self, weight: TensorSpec) -> CodedLayout:
        outputs, inputs = weight.shape
        return CodedLayout(CodeKind.TABLE4, (outputs, inputs), MX_BLOCK, torch.float8_e8m0fnu)

    def read(self, weight: TensorSpec, parts: Mapping[str, torch.Tensor]) -> CodedMatrix:
        layout = self.layout(weight)
        scales = parts[part_name(weight, "scales")].view(layout.scales)
        check_scales(tensor_name(weight, "scales"), scales)
        codes = parts[part_name(weight, "blocks")].flatten(1)[:, : -(-layout.shape[1] // 2)]
        return CodedMatrix(
            kind=layout.kind,
            shape=layout.shape,
            codes=codes,
            scales=scales,
            group_size=MX_BLOCK,
            table=e2m1_table(),
        )
