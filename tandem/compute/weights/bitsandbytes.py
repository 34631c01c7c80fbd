"""bitsandbytes' 4-bit checkpoints: indices into a table of 16 numbers, with a scale for each 64 consecutive ones
(arXiv:2305.14314).

`weight` uint8 [out * in / 2, 1], the first of two in the upper half; `weight.quant_map` the table (NF4 or FP4);
`weight.absmax` the scales. Double quantisation stores these as indices too: `absmax[i]` is then
`nested_quant_map[absmax[i]] * nested_absmax[i / 256] + nested_offset`. The offset and all sizes are in
`weight.quant_state.bitsandbytes__nf4`, JSON as bytes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tandem.architecture.fields import Fields
from tandem.architecture.tensors import Source, TensorSpec
from tandem.compute.codes import TABLE_SIZE, CodedMatrix, CodeKind
from tandem.compute.ops import Kernels
from tandem.compute.weights.base import StoredTensors, WeightFormat
from tandem.compute.weights.coded import CodedFormat, CodedLayout
from tandem.compute.weights.modules import except_for, where_stored
from tandem.compute.weights.parts import check_scales, part_name, part_spec, source_of, tensor_name
from tandem.core.errors import CorruptCheckpointError, UnsupportedCheckpointError

_BLOCK, _NESTED_BLOCK, _NESTED_TABLE = 64, 256, 256
_HALF_BITS = 4


@dataclass(frozen=True, slots=True)
class BlocksInARow:
    """Implements `coded.Coding`: names the stored tensors of a weight and reads them into a `CodedMatrix`.

    Args:
        kind: "nf4" or "fp4".
        is_nested: whether scales are quantised too (double quantisation).
    """

    kind: str
    is_nested: bool
    stored: StoredTensors | None  # None = the checkpoint is not open

    @property
    def name(self) -> str:
        return f"bitsandbytes-{self.kind}{'-nested' if self.is_nested else ''}"

    def checkpoint_tensors(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        outputs, inputs = weight.shape
        if inputs % _BLOCK:
            raise UnsupportedCheckpointError(
                f"{weight.name} has {inputs} inputs, so that blocks of {_BLOCK} go on in the next row; "
                f"multiples of {_BLOCK} are served: serve the checkpoint in another format"
            )
        scales = outputs * inputs // _BLOCK
        found = [
            self._of_outputs(weight, "weight", inputs // 2, (outputs * inputs // 2, 1), "uint8"),
            self._of_outputs(weight, "weight.absmax", inputs // _BLOCK, (scales,), self._scales_dtype),
            self._whole(weight, "weight.quant_map", (TABLE_SIZE,), "float32"),
            self._whole(weight, self._state, (), "uint8"),
        ]
        if self.is_nested:
            blocks = (-(-scales // _NESTED_BLOCK),)
            found.append(self._whole(weight, "weight.nested_absmax", blocks, "float32"))
            found.append(self._whole(weight, "weight.nested_quant_map", (_NESTED_TABLE,), "float32"))
        return tuple(found)

    def layout(self, weight: TensorSpec) -> CodedLayout:
        outputs, inputs = weight.shape
        return CodedLayout(CodeKind.TABLE4, (outputs, inputs), _BLOCK, torch.float32)

    def read(self, weight: TensorSpec, parts: Mapping[str, torch.Tensor]) -> CodedMatrix:
        layout, codes = self.layout(weight), parts[part_name(weight, "weight")]
        outputs, inputs = layout.shape
        scales = self._scales(weight, parts)
        check_scales(tensor_name(weight, "weight.absmax"), scales, can_be_zero=True)
        return CodedMatrix(
            kind=layout.kind,
            shape=layout.shape,
            codes=(codes >> _HALF_BITS | codes << _HALF_BITS).view(outputs, inputs // 2),
            scales=scales.view(outputs, inputs // _BLOCK),
            group_size=_BLOCK,
            table=parts[part_name(weight, "weight.quant_map")].clone(),  # NOTE: a view would keep the file mapped
        )

    def _scales(self, weight: TensorSpec, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """float32 [out * in / 64]."""
        scales, state = parts[part_name(weight, "weight.absmax")], self._read_state(weight, parts)
        state.only("blocksize", (_BLOCK,), str(_BLOCK))
        if not self.is_nested:
            return scales
        state.only("nested_blocksize", (_NESTED_BLOCK,), str(_NESTED_BLOCK))
        offset = state.get("nested_offset")
        if not isinstance(offset, float | int):
            raise state.wrong("nested_offset", "a number")
        table = parts[part_name(weight, "weight.nested_quant_map")]
        first = source_of(weight).start * weight.shape[1] // _BLOCK
        blocks = torch.arange(first, first + len(scales), device=scales.device) // _NESTED_BLOCK
        return table[scales.int()] * parts[part_name(weight, "weight.nested_absmax")][blocks] + offset

    def _read_state(self, weight: TensorSpec, parts: Mapping[str, torch.Tensor]) -> Fields:
        name = tensor_name(weight, self._state)
        try:
            found = json.loads(bytes(parts[part_name(weight, self._state)].cpu().numpy()))
        except ValueError as error:
            raise CorruptCheckpointError(f"{name} is no JSON ({error}); download the weights again") from error
        if not isinstance(found, dict):
            raise CorruptCheckpointError(f"{name} is no JSON object; download the weights again")
        return Fields(found, name)

    @property
    def _state(self) -> str:
        return f"weight.quant_state.bitsandbytes__{self.kind}"

    @property
    def _scales_dtype(self) -> str:
        return "uint8" if self.is_nested else "float32"

    def _of_outputs(
        self, weight: TensorSpec, suffix: str, width: int, shape: tuple[int, ...], dtype: str
    ) -> TensorSpec:
        """A flat tensor in which each output has `width` elements."""
        source, start = source_of(weight), source_of(weight).start
        if source.step != 1 or source.period is not None or source.index is not None:
            raise UnsupportedCheckpointError(
                f"{tensor_name(weight, suffix)} has the rows of {weight.name} in turns with those of others, or in a "
                "stack; serve a checkpoint that leaves this module uncoded, or one in another format"
            )
        part = Source(tensor_name(weight, suffix))
        if not source.is_whole:
            part = Source(part.tensor, start=start * width, stop=(start + weight.shape[0]) * width)
        return TensorSpec(part_name(weight, suffix), shape, part, code_dtype=dtype)

    def _whole(self, weight: TensorSpec, suffix: str, shape: tuple[int, ...], dtype: str) -> TensorSpec:
        """A tensor shared by all parts of a fused one. The file decides the size of those with shape () or [n]."""
        found = None if self.stored is None else self.stored.get(tensor_name(weight, suffix))
        is_free = not shape or (suffix == "weight.nested_absmax" and not source_of(weight).is_whole)
        shape = found.shape if found is not None and is_free else shape
        return part_spec(weight, suffix, shape, (dtype,), self.stored, is_shared=True)


def read(quantisation: Fields, kernels: Kernels, stored: StoredTensors | None) -> Sequence[WeightFormat]:
    """Reads a `quantization_config`: one format, for all modules with stored scales."""
    quantisation.only("load_in_8bit", (False,), "false: 4 bits are read, integers of 8 bits with outliers are not")
    quantisation.only("_load_in_8bit", (False,), "false")
    quantisation.only("bnb_4bit_quant_storage", ("uint8",), "uint8")
    kind = quantisation.text("bnb_4bit_quant_type", "fp4")
    quantisation.only("bnb_4bit_quant_type", ("nf4", "fp4"), "nf4, fp4")
    coding = BlocksInARow(str(kind), quantisation.flag("bnb_4bit_use_double_quant", False), stored)
    excluded = except_for(quantisation.texts("llm_int8_skip_modules") or ())
    choice = where_stored(("weight.absmax",), stored, excluded)
    return (CodedFormat(coding, choice, kernels),)
