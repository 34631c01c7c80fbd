"""Linear maps and norms with their tensors, taken by the names of their specs. The arithmetic is the kernels'."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tandem.architecture.tensors import LinearSpec, NormSpec
from tandem.compute.ops import Kernels


@dataclass(frozen=True, slots=True)
class Linear:
    """The affine map `x @ weight.T + bias`."""

    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None  # [out]
    kernels: Kernels

    @classmethod
    def take(cls, spec: LinearSpec, weights: Mapping[str, torch.Tensor], kernels: Kernels) -> "Linear":
        bias = weights[f"{spec.name}.bias"] if spec.bias else None
        return cls(weights[f"{spec.name}.weight"], bias, kernels)

    def __call__(self, x: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """[num_tokens, in] -> [num_tokens, out], of the dtype of `x` or float32."""
        return self.kernels.linear(x, self.weight, self.bias, out_dtype=out_dtype)


@dataclass(frozen=True, slots=True)
class Norm:
    """Root-mean-square norm over the last dimension."""

    weight: torch.Tensor  # [size]; ones where the spec has none
    spec: NormSpec
    kernels: Kernels

    @classmethod
    def take(cls, spec: NormSpec, weights: Mapping[str, torch.Tensor], kernels: Kernels) -> "Norm":
        if spec.tensor_name is not None:
            return cls(weights[spec.tensor_name], spec, kernels)
        device = next(iter(weights.values())).device
        return cls(torch.ones(spec.size, device=device), spec, kernels)

    @classmethod
    def take_optional(
        cls, spec: NormSpec | None, weights: Mapping[str, torch.Tensor], kernels: Kernels
    ) -> "Norm | None":
        return None if spec is None else cls.take(spec, weights, kernels)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The norm of `x`; with `residual`, `x` is first added into it in place and the sum is normed."""
        spec = self.spec
        return self.kernels.rms_norm(x, self.weight, spec.eps, residual=residual, unit_offset=spec.unit_offset)
