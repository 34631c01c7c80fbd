"""AWQ checkpoints in the "gemm" order: 4-bit integers, packed along the outputs in interleaved order (arXiv:2306.00978,
AutoAWQ 0.2.9).

`qweight` int32 [in, out / 8] and `qzeros` int32 [groups, out / 8]: half byte i of word j belongs to output `8 j +
order[i]`, with the order 0, 2, 4, 6, 1, 3, 5, 7. `scales` [groups, out]. Zero points are as stored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tandem.architecture.fields import Fields
from tandem.architecture.tensors import TensorSpec
from tandem.compute.codes import CodedMatrix, CodeKind
from tandem.compute.ops import Kernels
from tandem.compute.weights.base import StoredTensors, WeightFormat
from tandem.compute.weights.coded import CodedFormat, CodedLayout
from tandem.compute.weights.modules import checked_group, except_for, where_stored
from tandem.compute.weights.parts import FLOATS, check_scales, part_name, part_spec, tensor_name
from tandem.compute.weights.words import integer_codes, integer_matrix

_BITS, _PER_WORD = 4, 8
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_MARKERS = ("qweight", "scales")


@dataclass(frozen=True, slots=True)
class AwqIntegers:
    """Implements `coded.Coding`: names the stored tensors of a weight and reads them into a `CodedMatrix`.

    `group_size`: None = one scale per output.
    """

    group_size: int | None
    stored: StoredTensors | None  # None = the checkpoint is not open

    @property
    def name(self) -> str:
        return f"awq-gemm-int4-{'channels' if self.group_size is None else f'groups-of-{self.group_size}'}"

    def checkpoint_tensors(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        outputs, inputs = weight.shape
        words, groups = -(-outputs // _PER_WORD), -(-inputs // self._group(weight))
        return (
            part_spec(weight, "qweight", (words, inputs), ("int32",), self.stored, rows=_PER_WORD, transposed=True),
            part_spec(weight, "scales", (outputs, groups), FLOATS, self.stored, transposed=True),
            part_spec(weight, "qzeros", (words, groups), ("int32",), self.stored, rows=_PER_WORD, transposed=True),
        )

    def layout(self, weight: TensorSpec) -> CodedLayout:
        outputs, inputs = weight.shape
        scales: torch.dtype = getattr(torch, str(self.checkpoint_tensors(weight)[1].code_dtype))
        return CodedLayout(CodeKind.TABLE4, (outputs, inputs), self._group(weight), scales, torch.float32)

    def read(self, weight: TensorSpec, parts: Mapping[str, torch.Tensor]) -> CodedMatrix:
        layout, scales = self.layout(weight), parts[part_name(weight, "scales")]
        check_scales(tensor_name(weight, "scales"), scales)
        words, outputs = parts[part_name(weight, "qweight")], weight.shape[0]

        def rows(start: int, stop: int) -> torch.Tensor:
            first = start // _PER_WORD
            found = _outputs_of(words[first : -(-stop // _PER_WORD)])
            return found[start - first * _PER_WORD :][: stop - start]

        zeros = _outputs_of(parts[part_name(weight, "qzeros")])[:outputs]
        return integer_matrix(layout, _BITS, integer_codes(rows, layout.shape, _BITS), scales, zeros)

    def _group(self, weight: TensorSpec) -> int:
        inputs = weight.shape[1]
        return inputs if self.group_size is None else min(self.group_size, inputs)


def _outputs_of(words: torch.Tensor) -> torch.Tensor:
    """Unpacks int32 [words, n] into uint8 [8 * words, n]."""
    shifts = torch.empty(_PER_WORD, dtype=torch.int32)
    shifts[list(_ORDER)] = torch.arange(0, _PER_WORD * _BITS, _BITS, dtype=torch.int32)
    found = words[:, None, :] >> shifts[None, :, None] & (1 << _BITS) - 1
    return found.to(torch.uint8).flatten(0, 1)


def read(quantisation: Fields, kernels: Kernels, stored: StoredTensors | None) -> Sequence[WeightFormat]:
    """Reads a `quantization_config`: one format, for all modules whose integers are stored."""
    quantisation.only("bits", (_BITS,), "4")
    quantisation.only("version", ("gemm", "GEMM"), "gemm")
    quantisation.only("zero_point", (True,), "true")
    size = quantisation.count("group_size", 128, low=-1)
    coding = AwqIntegers(None if size <= 0 else checked_group(quantisation, "group_size", size), stored)
    excluded = except_for(quantisation.texts("modules_to_not_convert") or ())
    return (CodedFormat(coding, where_stored(_MARKERS, stored, excluded), kernels),)
