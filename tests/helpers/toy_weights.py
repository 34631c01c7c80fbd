"""A format of weights that no checkpoint here has: int8 codes with a scale for each output, multiplied in PyTorch."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn import functional

from tandem.architecture.cost import Products
from tandem.architecture.feed_forward import Activation, Clamp
from tandem.architecture.fields import Fields
from tandem.architecture.model import HEAD
from tandem.architecture.registry import find_family
from tandem.architecture.tensors import Source, TensorSpec
from tandem.compute.ops import Experts, Kernels
from tandem.compute.weights.base import ExpertLinears, Linear, Pieces, StoredTensors, Weight, WeightFormat
from tandem.compute.weights.dense import DenseFormat
from tandem.core.errors import CorruptCheckpointError
from tests.helpers import checkpoints


@dataclass(frozen=True, slots=True)
class ToyWeight:
    """Implements `Weight`."""

    codes: torch.Tensor  # [out, in] int8
    scales: torch.Tensor  # [out]
    has_grouped: bool

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.codes.shape
        return outputs, inputs

    @property
    def dtype(self) -> torch.dtype:
        return self.scales.dtype

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    @property
    def matrix(self) -> None:
        return None

    def __call__(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return functional.linear(x, self.codes * self.scales[:, None], bias).to(out_dtype or x.dtype)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None, up: Linear, activation: Activation) -> None:
        """There is none."""

    def grouped(self, experts: Sequence[ExpertLinears], activation: Activation, clamp: Clamp | None) -> Experts | None:
        return ToyExperts(experts) if self.has_grouped and activation == "silu" and clamp is None else None


class ToyExperts:
    """Implements `Experts`, and counts how often it was called."""

    num_calls = 0

    def __init__(self, experts: Sequence[ExpertLinears]) -> None:
        self._experts = experts

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, *, out_dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        type(self).num_calls += 1
        out = torch.zeros(x.shape, dtype=torch.float32)
        for number in sorted(set(chosen.flatten().tolist())):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            expert, hit = self._experts[number], x[rows]
            y = expert.down(functional.silu(expert.gate(hit)) * expert.up(hit), out_dtype=torch.float32)
            out.index_add_(0, rows, y * weights[rows, place].unsqueeze(1))
        return out.to(out_dtype)


@dataclass(frozen=True, slots=True)
class ToyFormat:
    """Implements `WeightFormat`. `has_grouped`: whether a layer's experts are one call."""

    has_grouped: bool = False
    name: str = "toy-int8"

    @property
    def packed(self) -> "ToyPacked":
        return ToyPacked(self)

    def refusal(self, weight: TensorSpec) -> str | None:
        return "heads and routers are not coded" if weight.name == HEAD or weight.is_small else None

    def has_table(self, table: TensorSpec) -> bool:
        return False

    def check_model(self, weights: Sequence[TensorSpec], others: Collection[str]) -> None:
        """There is no configuration."""

    def ignores(self, name: str, tensor: torch.Tensor) -> bool:
        return False

    def checkpoint_tensors(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        source = weight.source or Source(weight.name)
        scales = replace(source, tensor=f"{source.tensor}_scale", transposed=False)
        return (
            replace(weight, code_dtype="int8"),
            TensorSpec(f"{weight.name}_scale", weight.shape[:1], scales),
        )

    def memory_tensors(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        return self.checkpoint_tensors(weight)

    def products(self, weight: TensorSpec) -> Products:
        return Products.INT8

    def pieces(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        return (weight,)

    def load(self, weight: TensorSpec, pieces: Pieces) -> Weight:
        (parts,) = pieces
        scales = parts[f"{weight.name}_scale"]
        if not (scales > 0).all():
            raise CorruptCheckpointError(f"{weight.name}_scale has scales that are not positive")
        return ToyWeight(parts[weight.name], scales, self.has_grouped)


@dataclass(frozen=True, slots=True)
class ToyPacked:
    """Implements `PackedForm`: columns of codes one after the other."""

    of: ToyFormat
    layout: str = "toy-columns/1"

    def refusal(self, weight: TensorSpec, dtype: str) -> str | None:
        return None

    def stored(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        codes, scales = self.of.checkpoint_tensors(weight)
        return replace(codes, shape=codes.shape[::-1]), scales

    def pack(self, weight: TensorSpec, pieces: Pieces) -> Iterator[torch.Tensor]:
        (parts,) = pieces
        yield parts[weight.name].T.contiguous()
        yield parts[f"{weight.name}_scale"]

    def load(self, weight: TensorSpec, parts: Mapping[str, torch.Tensor]) -> Weight:
        return self.of.load(weight, [{**parts, weight.name: parts[weight.name].T}])


def read_toy(fields: Fields, kernels: Kernels, stored: StoredTensors | None = None) -> Sequence[WeightFormat]:
    """Implements `FormatReader`."""
    return ToyFormat(), DenseFormat(kernels)


def read_toy_with_grouped(
    fields: Fields, kernels: Kernels, stored: StoredTensors | None = None
) -> Sequence[WeightFormat]:
    """Implements `FormatReader`."""
    return ToyFormat(has_grouped=True), DenseFormat(kernels)


def save_coded(path: Path, coded: Path, decoded: Path) -> None:
    """The checkpoint in `path` with its weights as codes and scales, and one of the numbers that these stand for."""
    config = json.loads((path / "config.json").read_text())
    fields = Fields(config, str(path))
    spec, tensors = find_family(fields).read_model(fields), checkpoints.read_tensors(path)
    weights = [weight for weight in spec.weights() if ToyFormat().refusal(weight) is None]
    sources = {(weight.source or Source(weight.name)).tensor for weight in weights}
    codes, numbers = dict(tensors), dict(tensors)
    for name in sources:
        scales = tensors[name].abs().amax(-1) / 127
        rounded = (tensors[name] / scales.unsqueeze(-1)).round()
        codes |= {name: rounded.to(torch.int8), f"{name}_scale": scales}
        numbers[name] = rounded * scales.unsqueeze(-1)
    for directory, content in ((coded, codes), (decoded, numbers)):
        directory.mkdir(parents=True)
        for file in path.iterdir():
            (directory / file.name).write_bytes(file.read_bytes())
        checkpoints.write_tensors(directory, content)
