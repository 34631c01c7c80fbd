"""Mixture of experts: each token passes the few that its router chose; only the experts that are hit are read.

A token's sum has a fixed order, its experts by index and then the shared block, whatever tokens are beside it.
"""

from collections.abc import Mapping

import torch

from tandem.architecture.feed_forward import MixtureOfExpertsSpec
from tandem.kernels.base import Kernels
from tandem.models.layers.linear import Linear, Norm
from tandem.models.layers.mlp import GatedMLP
from tandem.models.layers.router import Router
from tandem.models.layers.sigmoid import rowwise_sigmoid


class MixtureOfExperts:
    """Computes a `MixtureOfExpertsSpec` with the tensors that it names.

    `graph_safe`: which experts are computed depends on data, so no CUDA graph can hold it.
    """

    graph_safe = False

    def __init__(self, spec: MixtureOfExpertsSpec, weights: Mapping[str, torch.Tensor], kernels: Kernels) -> None:
        self._kernels = kernels
        self._router = Router(spec.router, weights, kernels)
        self._before_experts = Norm.take_optional(spec.before_experts, weights, kernels)
        self._experts = tuple(GatedMLP(expert, weights, kernels) for expert in spec.experts)
        self._shared = None if spec.shared is None else GatedMLP(spec.shared, weights, kernels)
        self._shared_gate = None if spec.shared_gate is None else Linear.take(spec.shared_gate, weights, kernels)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [num_tokens, hidden] -> the same shape; summed in float32 and rounded once."""
        out = self._routed(x)
        if self._shared is not None:
            shared = self._shared(x).float()
            out += shared if self._shared_gate is None else shared * rowwise_sigmoid(self._shared_gate(x).float())
        return out.to(x.dtype)

    def _routed(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden] float32. Pairs of token and expert are sorted by expert: one product an expert hit."""
        weights, chosen = self._router(x)
        x = x if self._before_experts is None else self._before_experts(x)
        order = chosen.flatten().argsort(stable=True)
        tokens = order // chosen.shape[1]
        scales = weights.flatten()[order].unsqueeze(1)
        counts = chosen.flatten().bincount(minlength=len(self._experts)).tolist()
        out = torch.zeros_like(x, dtype=torch.float32)
        start = 0
        for expert, count in enumerate(counts):
            if count:
                part = slice(start, start + count)
                y = self._experts[expert](self._kernels.take_rows(x, tokens[part]))
                out.index_add_(0, tokens[part], y.float() * scales[part])
                start += count
        return out
