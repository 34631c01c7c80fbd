"""Root-mean-square and layer norms with their tensors; the former are computed by the kernels."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from tandem.architecture.tensors import LayerNormSpec, NormSpec
from tandem.compute.ops import Kernels
from tandem.models.parameters import Parameters


@dataclass(frozen=True, slots=True)
class Norm:
    """Root-mean-square norm over the last dimension."""

    weight: torch.Tensor  # [size]; ones where the spec has none
    spec: NormSpec
    kernels: Kernels

    @classmethod
    def take(cls, spec: NormSpec, parameters: Parameters, kernels: Kernels) -> "Norm":
        if spec.tensor_name is not None:
            return cls(parameters.tensors[spec.tensor_name], spec, kernels)
        device = next(iter(parameters.tensors.values())).device
        return cls(torch.ones(spec.size, device=device), spec, kernels)

    @classmethod
    def take_optional(cls, spec: NormSpec | None, parameters: Parameters, kernels: Kernels) -> "Norm | None":
        return None if spec is None else cls.take(spec, parameters, kernels)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The norm of `x`; with `residual`, `x` is first added into `residual` in place and the sum is normed."""
        spec = self.spec
        return self.kernels.rms_norm(x, self.weight, spec.eps, residual=residual, unit_offset=spec.unit_offset)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Norm to mean 0 and variance 1 over the last dimension."""

    weight: torch.Tensor  # [size]
    bias: torch.Tensor  # [size]
    eps: float

    @classmethod
    def take(cls, spec: LayerNormSpec, parameters: Parameters) -> "LayerNorm":
        weight, bias = (parameters.tensors[tensor.name] for tensor in spec.tensors())
        return cls(weight, bias, spec.eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
