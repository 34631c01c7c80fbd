"""A format of weights that are read as floats and kept as codes: any checkpoint as one of codes."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from tandem.architecture.cost import Products
from tandem.architecture.fields import Fields
from tandem.architecture.model import HEAD
from tandem.architecture.tensors import TensorSpec
from tandem.compute.codes import CodedMatrix, CodeKind
from tandem.compute.ops import Kernels
from tandem.compute.weights.base import Pieces, StoredTensors, Weight, WeightFormat
from tandem.compute.weights.coded import CodedWeight
from tandem.compute.weights.dense import DenseFormat
from tests.helpers.coded_matrices import INT4

_LARGEST = {CodeKind.TABLE4: 7.0, CodeKind.INT8: 127.0, CodeKind.E4M3: 448.0}


@dataclass(frozen=True, slots=True)
class Rounding:
    """Kind of codes, and inputs to a scale; None = all."""

    kind: CodeKind
    group_size: int | None
    scales: torch.dtype = torch.bfloat16
    has_offsets: bool = False
    is_permuted: bool = False
    rounds_rows: bool = False


def round_to_codes(numbers: torch.Tensor, rounding: Rounding) -> CodedMatrix:
    """The nearest codes to `numbers` [out, in], of scales by which each group's largest is the largest code."""
    wide = numbers.float()
    outputs, inputs = wide.shape
    group_size = min(rounding.group_size or inputs, inputs)
    permutation = (
        torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs)) if rounding.is_permuted else None
    )
    if permutation is not None:
        wide = wide[:, permutation]
    groups = [part.aminmax(dim=1) for part in torch.split(wide, group_size, dim=1)]
    least, most = (torch.stack(parts, dim=1) for parts in zip(*groups, strict=True))
    offsets = ((least + most) / 2).to(rounding.scales) if rounding.has_offsets else None
    middle = torch.zeros_like(most) if offsets is None else offsets.float()
    largest = torch.maximum(most - middle, middle - least).clamp_min(1e-6)
    scales = (largest / _LARGEST[rounding.kind]).to(rounding.scales)
    by_input = [x.repeat_interleave(group_size, dim=1)[:, :inputs] for x in (middle, scales.float())]
    scaled = (wide - by_input[0]) / by_input[1]
    return CodedMatrix(
        kind=rounding.kind,
        shape=(outputs, inputs),
        codes=_codes(scaled, rounding.kind),
        scales=scales,
        group_size=group_size,
        table=INT4.clone() if rounding.kind is CodeKind.TABLE4 else None,
        offsets=offsets,
        permutation=permutation,
        rounds_rows=rounding.rounds_rows,
    )


def _codes(scaled: torch.Tensor, kind: CodeKind) -> torch.Tensor:
    if kind is CodeKind.E4M3:
        return scaled.clamp(-448, 448).to(torch.float8_e4m3fn)
    if kind is CodeKind.INT8:
        return scaled.round().clamp(-128, 127).to(torch.int8)
    indices = (scaled.round() + 8).clamp(0, 15).to(torch.uint8)
    if indices.shape[1] % 2:
        indices = torch.nn.functional.pad(indices, (0, 1))
    return indices[:, 0::2] | indices[:, 1::2] << 4


@dataclass(frozen=True, slots=True)
class RoundedFormat:
    """Implements `WeightFormat`.

    `head`: of the output head; None = it is left to another format, as are routers and names that end with `left`.
    """

    kernels: Kernels
    rounding: Rounding
    head: Rounding | None
    left: tuple[str, ...] = ()
    is_packed: bool = True
    name: str = "rounded"
    packed: None = None

    def refusal(self, weight: TensorSpec) -> str | None:
        is_left = weight.is_small or weight.name.endswith(self.left) or self._of(weight) is None
        return "it is left as it is" if is_left else None

    def has_table(self, table: TensorSpec) -> bool:
        return False

    def check_model(self, weights: Sequence[TensorSpec], others: Collection[str]) -> None:
        """There is no configuration."""

    def ignores(self, name: str, tensor: torch.Tensor) -> bool:
        return False

    def checkpoint_tensors(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        return (weight,)

    def memory_tensors(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        return (weight,)

    def products(self, weight: TensorSpec) -> Products:
        return Products.INT8

    def pieces(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        return (weight,)

    def load(self, weight: TensorSpec, pieces: Pieces) -> Weight:
        (parts,) = pieces
        rounding = self._of(weight)
        assert rounding is not None
        coded = round_to_codes(parts[weight.name], rounding)
        is_packed = self.is_packed and self.kernels.can_pack_coded(coded)
        return CodedWeight(self.kernels.pack_coded(coded) if is_packed else coded, self.kernels)

    def _of(self, weight: TensorSpec) -> Rounding | None:
        return self.head if weight.name == HEAD else self.rounding


@dataclass(frozen=True, slots=True)
class RoundedReader:
    """Implements `FormatReader`."""

    rounding: Rounding
    head: Rounding | None = None
    left: tuple[str, ...] = ()
    is_packed: bool = True

    def __call__(self, fields: Fields, kernels: Kernels, stored: StoredTensors | None = None) -> Sequence[WeightFormat]:
        return RoundedFormat(kernels, self.rounding, self.head, self.left, self.is_packed), DenseFormat(kernels)
