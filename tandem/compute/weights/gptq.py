"""GPTQ checkpoints: integers of 2, 3, 4 or 8 bits, packed along the inputs, stored [inputs, outputs]
(arXiv:2210.17323).

`qweight` int32 [words of in, out]; `scales` [groups, out]; `qzeros` int32 [groups, words of out], packed along the
outputs; `g_idx` int32 [in], the group of each input. Files of version 1 store zero points less 1. With `desc_act` the
inputs of a group are not contiguous: they are sorted when loaded, and activations are permuted likewise.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tandem.architecture.fields import REQUIRED, Fields
from tandem.architecture.tensors import TensorSpec
from tandem.compute.codes import CodedMatrix
from tandem.compute.ops import Kernels
from tandem.compute.weights.base import Choice, StoredTensors, WeightFormat
from tandem.compute.weights.coded import CodedFormat, CodedLayout
from tandem.compute.weights.modules import checked_group, compiled, names_of, renamed_modules, where_stored
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

_BITS = (2, 3, 4, 8)
_WORDS = ("int32",)
_MARKERS = ("qweight", "scales")
_WITHOUT, _WITH = (
    "-:",
    "+:",
)  # prefixes of patterns in `dynamic`: modules not quantised, or quantised differently


@dataclass(frozen=True, slots=True)
class GptqIntegers:
    """Implements `coded.Coding`: names the stored tensors of a weight and reads them into a `CodedMatrix`.

    Args:
        group_size: None = one scale per output.
        has_order: whether the inputs of a group are not contiguous.
        is_symmetric: whether every zero point is half the range.
        zero_shift: number added to a stored zero point.
    """

    bits: int
    group_size: int | None
    has_order: bool
    is_symmetric: bool
    zero_shift: int
    stored: StoredTensors | None = field(compare=False)  # None = the checkpoint is not open

    @property
    def name(self) -> str:
        groups = "channels" if self.group_size is None else f"groups-of-{self.group_size}"
        order, zeros = "-ordered" if self.has_order else "", "" if self.is_symmetric else "-zeros"
        return f"gptq-int{self.bits}-{groups}{order}{zeros}-shift-{self.zero_shift}"

    def checkpoint_tensors(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        outputs, inputs = weight.shape
        groups = -(-inputs // self._group(weight))
        shapes = {
            "qweight": ((outputs, num_words(inputs, self.bits)), _WORDS, (1, 1)),
            "scales": ((outputs, groups), FLOATS, (1, 1)),
            "qzeros": ((num_words(outputs, self.bits), groups), _WORDS, aligned(self.bits)),
        }
        found = [
            part_spec(weight, suffix, shape, dtypes, self.stored, rows=rows, words=words, transposed=True)
            for suffix, (shape, dtypes, (rows, words)) in shapes.items()
        ]
        if self._is_permuted or (self.stored is not None and tensor_name(weight, "g_idx") in self.stored):
            found.append(part_spec(weight, "g_idx", (inputs,), ("int32", "int64"), self.stored, is_shared=True))
        return tuple(found)

    def layout(self, weight: TensorSpec) -> CodedLayout:
        outputs, inputs = weight.shape
        scales: torch.dtype = getattr(torch, str(self.checkpoint_tensors(weight)[1].code_dtype))
        offsets = None if self.is_symmetric else torch.float32
        kind, group_size = integer_kind(self.bits), self._group(weight)
        return CodedLayout(kind, (outputs, inputs), group_size, scales, offsets, self._is_permuted)

    def read(self, weight: TensorSpec, parts: Mapping[str, torch.Tensor]) -> CodedMatrix:
        layout, scales = self.layout(weight), parts[part_name(weight, "scales")]
        check_scales(tensor_name(weight, "scales"), scales)
        permutation = self._permutation(weight, parts)
        codes = word_codes(parts[part_name(weight, "qweight")], layout.shape, self.bits, permutation)
        zeros = None if self.is_symmetric else self._zeros(weight, parts)
        if self.is_symmetric:
            self._check_zeros(weight, self._zeros(weight, parts))
        return integer_matrix(layout, self.bits, codes, scales, zeros, permutation)

    def _zeros(self, weight: TensorSpec, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Zero points, uint8 [out, groups]. NOTE: version 1 stores 0 as the largest integer, so the sum wraps."""
        words = parts[part_name(weight, "qzeros")].T.contiguous()
        return (unpack_words(words, self.bits, weight.shape[0]).T + self.zero_shift) & (1 << self.bits) - 1

    def _check_zeros(self, weight: TensorSpec, zeros: torch.Tensor) -> None:
        middle = 1 << self.bits - 1
        if (zeros != middle).any():
            raise CorruptCheckpointError(
                f"{tensor_name(weight, 'qzeros')} has zero points from {int(zeros.min())} to {int(zeros.max())}, and "
                f"quantization_config says sym=true, for which all are {middle}; correct `sym` or `checkpoint_format`"
            )

    def _permutation(self, weight: TensorSpec, parts: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        name, groups = tensor_name(weight, "g_idx"), parts.get(part_name(weight, "g_idx"))
        if groups is None:
            return None
        order = sorted_groups(name, groups, self._group(weight))
        if self._is_permuted:
            return order
        if not torch.equal(order, torch.arange(len(order))):
            raise CorruptCheckpointError(
                f"{name} has groups in another order than inputs, and quantization_config says desc_act=false; "
                "correct it, or download config.json again"
            )
        return None

    @property
    def _is_permuted(self) -> bool:
        return self.has_order and self.group_size is not None

    def _group(self, weight: TensorSpec) -> int:
        inputs = weight.shape[1]
        return inputs if self.group_size is None else min(self.group_size, inputs)


@dataclass(frozen=True, slots=True)
class _Rules:
    """The coding of each module: that of the first pattern of `dynamic` that its name begins with, else `common`.

    None = a module that is not quantised. `renamed`: see `renamed_modules`.
    """

    patterns: Sequence[tuple[re.Pattern[str], GptqIntegers | None]]
    common: GptqIntegers
    renamed: Mapping[str, str]

    def coding(self, weight: TensorSpec) -> GptqIntegers | None:
        names = names_of(weight, self.renamed)
        found = (coding for pattern, coding in self.patterns if any(pattern.match(name) for name in names))
        return next(found, self.common)

    def choice(self, coding: GptqIntegers, present: Choice) -> Choice:
        """Chooses weights that have `coding`: None, or the reason why a weight does not have it."""
        return lambda weight: present(weight) if self.coding(weight) == coding else f"it is not {coding.name}"


def read(quantisation: Fields, kernels: Kernels, stored: StoredTensors | None) -> Sequence[WeightFormat]:
    """Reads a `quantization_config`: a format for each coding that modules have."""
    common = _read_coding(quantisation, None, stored)
    patterns: list[tuple[re.Pattern[str], GptqIntegers | None]] = []
    dynamic = quantisation.section("dynamic") or Fields({}, quantisation.where)
    for key in tuple(dynamic.unread()):
        pattern = compiled(dynamic, key, key.removeprefix(_WITHOUT).removeprefix(_WITH))
        section = dynamic.section(key) or Fields({}, dynamic.where)
        patterns.append((pattern, None if key.startswith(_WITHOUT) else _read_coding(section, common, stored)))
    rules, present = _Rules(patterns, common, renamed_modules(stored)), where_stored(_MARKERS, stored)
    codings = dict.fromkeys((*(coding for _, coding in patterns if coding is not None), common))
    return [CodedFormat(coding, rules.choice(coding, present), kernels) for coding in codings]


def _read_coding(fields: Fields, common: GptqIntegers | None, stored: StoredTensors | None) -> GptqIntegers:
    """`common`: values of absent keys; None = this is the coding of the whole model."""
    layout = next((key for key in ("checkpoint_format", "format") if fields.has(key)), "checkpoint_format")
    fields.only(layout, ("gptq", "gptq_v2"), "gptq, gptq_v2")
    shift = {None: 1 if common is None else common.zero_shift, "gptq": 1, "gptq_v2": 0}[fields.text(layout)]
    fields.only("bits", _BITS, ", ".join(map(str, _BITS)))
    size = -1 if common is None or common.group_size is None else common.group_size
    size = fields.count("group_size", size, low=-1)
    return GptqIntegers(
        bits=fields.count("bits", REQUIRED if common is None else common.bits),
        group_size=None if size <= 0 else checked_group(fields, "group_size", size),
        has_order=fields.flag("desc_act", common is not None and common.has_order),
        is_symmetric=fields.flag("sym", common is not None and common.is_symmetric),
        zero_shift=shift,
        stored=stored,
    )
