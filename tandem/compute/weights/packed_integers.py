"""compressed-tensors' "pack-quantized" weights: integers of 2 to 8 bits packed along the inputs, with scales and zero
points per group or row.

Layout (compressed_tensors 0.20, compressors/pack_quantized): `weight_packed` int32 [out, words]; `weight_scale` [out,
groups]; `weight_zero_point` int32 [words of out, groups], packed along the outputs. Stored integers are the numbers
plus `2 ** (bits - 1)`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tandem.architecture.tensors import TensorSpec
from tandem.compute.codes import CodedMatrix
from tandem.compute.weights.base import StoredTensors
from tandem.compute.weights.coded import CodedLayout
from tandem.compute.weights.parts import FLOATS, check_scales, part_name, part_spec, tensor_name
from tandem.compute.weights.words import (
    aligned,
    integer_kind,
    integer_matrix,
    num_words,
    sorted_groups,
    unpack_words,
    word_codes,
)
from tandem.core.errors import CorruptCheckpointError


@dataclass(frozen=True, slots=True)
class PackedIntegers:
    """Implements `coded.Coding`: names the stored tensors of a weight and reads them into a `CodedMatrix`.

    Args:
        group_size: None = one scale per row.
        has_order: whether `weight_g_idx` has the group of each input.
    """

    bits: int
    group_size: int | None
    is_symmetric: bool
    stored: StoredTensors | None  # None = the checkpoint is not open
    has_order: bool = False

    @property
    def name(self) -> str:
        groups = "channels" if self.group_size is None else f"groups-of-{self.group_size}"
        return f"packed-int{self.bits}-{groups}{'' if self.is_symmetric else '-zeros'}"

    def checkpoint_tensors(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        outputs, inputs = weight.shape
        groups = -(-inputs // self._group(weight))
        found = [
            part_spec(weight, "weight_packed", (outputs, num_words(inputs, self.bits)), ("int32",), self.stored),
            part_spec(weight, "weight_scale", (outputs, groups), FLOATS, self.stored),
        ]
        if not self.is_symmetric:
            rows, words = aligned(self.bits)
            shape = (num_words(outputs, self.bits), groups)
            found.append(part_spec(weight, "weight_zero_point", shape, ("int32",), self.stored, rows=rows, words=words))
        if self._is_permuted:
            found.append(part_spec(weight, "weight_g_idx", (inputs,), ("int32", "int64"), self.stored, is_shared=True))
        shape_name = tensor_name(weight, "weight_shape")
        if self.stored is not None and shape_name in self.stored:
            found.append(part_spec(weight, "weight_shape", (2,), ("int64", "int32"), self.stored, is_shared=True))
        return tuple(found)

    def layout(self, weight: TensorSpec) -> CodedLayout:
        outputs, inputs = weight.shape
        scales: torch.dtype = getattr(torch, str(self.checkpoint_tensors(weight)[1].code_dtype))
        offsets = None if self.is_symmetric else torch.float32
        return CodedLayout(
            integer_kind(self.bits), (outputs, inputs), self._group(weight), scales, offsets, self._is_permuted
        )

    def read(self, weight: TensorSpec, parts: Mapping[str, torch.Tensor]) -> CodedMatrix:
        layout = self.layout(weight)
        scales = parts[part_name(weight, "weight_scale")]
        check_scales(tensor_name(weight, "weight_scale"), scales)
        _check_shape(weight, parts)
        permutation = None
        if self._is_permuted:
            name = tensor_name(weight, "weight_g_idx")
            permutation = sorted_groups(name, parts[part_name(weight, "weight_g_idx")], layout.group_size)
        codes = word_codes(parts[part_name(weight, "weight_packed")], layout.shape, self.bits, permutation)
        zeros = None
        if not self.is_symmetric:
            words = parts[part_name(weight, "weight_zero_point")]
            zeros = unpack_words(words.T.contiguous(), self.bits, layout.shape[0]).T
        return integer_matrix(layout, self.bits, codes, scales, zeros, permutation)

    @property
    def _is_permuted(self) -> bool:
        return self.has_order and self.group_size is not None

    def _group(self, weight: TensorSpec) -> int:
        inputs = weight.shape[1]
        return inputs if self.group_size is None else min(self.group_size, inputs)


def _check_shape(weight: TensorSpec, parts: Mapping[str, torch.Tensor]) -> None:
    """Checks that `weight_shape`, which fused weights share, has the weight's number of inputs."""
    shape = parts.get(part_name(weight, "weight_shape"))
    if shape is not None and (shape[1] != weight.shape[1] or shape[0] < weight.shape[0]):
        raise CorruptCheckpointError(
            f"{tensor_name(weight, 'weight_shape')} says {shape.tolist()}, config.json calls for {list(weight.shape)}; "
            "download the weights again"
        )
