"""Mixture of experts: each token passes the few that its router chose; only the experts that are hit are read.

A token's sum has a fixed order, its experts by index and then the shared block, whatever tokens are beside it.
"""

from collections.abc import Mapping, Sequence

import torch

from tandem.architecture.feed_forward import GatedSpec, MixtureOfExpertsSpec
from tandem.architecture.tensors import LinearSpec
from tandem.compute.ops import Experts, ExpertWeights, Kernels
from tandem.models.layers.linear import Linear, Norm
from tandem.models.layers.mlp import GatedMLP
from tandem.models.layers.router import ExpertRouter
from tandem.models.layers.sigmoid import rowwise_sigmoid


class MixtureOfExperts:
    """Computes a `MixtureOfExpertsSpec` with the tensors that it names.

    `graph_safe`: which experts are computed depends on data, so no CUDA graph can hold it.
    """

    graph_safe = False

    def __init__(self, spec: MixtureOfExpertsSpec, weights: Mapping[str, torch.Tensor], kernels: Kernels) -> None:
        self._router = ExpertRouter(spec.router, weights, kernels)
        self._before_experts = Norm.take_optional(spec.before_experts, weights, kernels)
        self._experts = compile_experts(spec.experts, weights, kernels) or ExpertsInTurn(spec.experts, weights, kernels)
        self._shared = None if spec.shared is None else GatedMLP(spec.shared, weights, kernels)
        self._shared_gate = None if spec.shared_gate is None else Linear.take(spec.shared_gate, weights, kernels)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [num_tokens, hidden] -> the same shape; summed in float32 and rounded once."""
        routed = x if self._before_experts is None else self._before_experts(x)
        if self._shared is None:
            return self._experts(routed, *self._router(x), out_dtype=x.dtype)
        out = self._experts(routed, *self._router(x))
        shared = self._shared(x).float()
        out += shared if self._shared_gate is None else shared * rowwise_sigmoid(self._shared_gate(x).float())
        return out.to(x.dtype)


class ExpertsInTurn:
    """Implements `Experts` with one call of the kernels after the other, for any expert and device."""

    def __init__(self, experts: Sequence[GatedSpec], weights: Mapping[str, torch.Tensor], kernels: Kernels) -> None:
        self._kernels = kernels
        self._experts = tuple(GatedMLP(expert, weights, kernels) for expert in experts)

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, *, out_dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """See `Experts`. Pairs of token and expert are sorted by expert: one product an expert hit."""
        order = chosen.flatten().argsort(stable=True)
        tokens = order // chosen.shape[1]
        scales = weights.flatten()[order].unsqueeze(1)
        counts = chosen.flatten().bincount(minlength=len(self._experts)).tolist()
        out = torch.zeros_like(x, dtype=torch.float32)
        start = 0
        for expert, count in enumerate(counts):
            if count:
                part = slice(start, start + count)
                y = self._experts[expert](self._kernels.take_rows(x, tokens[part]), out_dtype=torch.float32)
                out.index_add_(0, tokens[part], y * scales[part])
                start += count
        return out.to(out_dtype)


def compile_experts(
    experts: Sequence[GatedSpec], weights: Mapping[str, torch.Tensor], kernels: Kernels
) -> Experts | None:
    """The experts as one call of the kernels, where they have one for such experts.

    NOTE: the comparison is with a spec of the fields that the call is given, so any other field must have its default.
    """
    first = experts[0]
    known = (
        GatedSpec(expert.gate, expert.up, expert.down, first.activation, first.clamp) == expert for expert in experts
    )
    if not all(known):
        return None
    return kernels.experts(first.activation, first.clamp, [_take(expert, weights) for expert in experts])


def _take(expert: GatedSpec, weights: Mapping[str, torch.Tensor]) -> ExpertWeights:
    def matrix(linear: LinearSpec) -> torch.Tensor:
        return weights[f"{linear.name}.weight"]

    def bias(linear: LinearSpec) -> torch.Tensor | None:
        return weights[f"{linear.name}.bias"] if linear.bias else None

    gate, up, down = expert.gate, expert.up, expert.down
    return ExpertWeights(matrix(gate), matrix(up), matrix(down), bias(gate), bias(up), bias(down))
