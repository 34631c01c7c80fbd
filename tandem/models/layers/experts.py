"""Mixture of experts: computes each token with the few experts that its router chose; only these experts' weights are
read.

A token's sum has a fixed order, its experts by index and then the shared block, whatever other tokens are computed.
"""

from collections.abc import Sequence

import torch

from tandem.architecture.feed_forward import BlockSpec, GatedSpec, MixtureOfExpertsSpec
from tandem.compute.ops import Experts, Kernels
from tandem.compute.weights.base import ExpertLinears
from tandem.models.layers.mlp import build_block
from tandem.models.layers.norm import Norm
from tandem.models.layers.router import ExpertRouter
from tandem.models.layers.sigmoid import rowwise_sigmoid
from tandem.models.parameters import Parameters


class MixtureOfExperts:
    """Computes a `MixtureOfExpertsSpec` with the tensors that it names.

    `graph_safe` is False: the experts computed depend on data, so a CUDA graph cannot capture them.
    """

    graph_safe = False

    def __init__(self, spec: MixtureOfExpertsSpec, parameters: Parameters, kernels: Kernels) -> None:
        self._router = ExpertRouter(spec.router, parameters, kernels)
        self._before_experts = Norm.take_optional(spec.before_experts, parameters, kernels)
        own = compile_experts(spec.experts, parameters) or ExpertsInTurn(spec.experts, parameters, kernels)
        self._experts = parameters.spread(own, spec.bounds)
        self._experts_in = None if spec.experts_in is None else parameters.linear(spec.experts_in)
        self._experts_out = None if spec.experts_out is None else parameters.linear(spec.experts_out)
        self._shared = None if spec.shared is None else build_block(spec.shared, parameters, kernels)
        self._shared_gate = None if spec.shared_gate is None else parameters.linear(spec.shared_gate)

    def __call__(self, x: torch.Tensor, input_ids: torch.Tensor | None = None) -> torch.Tensor:
        """`x` [num_tokens, hidden] -> the same shape; summed in float32, rounded last and before `experts_out`."""
        routed = x if self._before_experts is None else self._before_experts(x)
        if self._shared is None:
            return self._routed(routed, x, input_ids, out_dtype=x.dtype)
        out = self._routed(routed, x, input_ids, out_dtype=torch.float32)
        shared = self._shared(x).float()
        out += shared if self._shared_gate is None else shared * rowwise_sigmoid(self._shared_gate(x).float())
        return out.to(x.dtype)

    def _routed(
        self, routed: torch.Tensor, x: torch.Tensor, input_ids: torch.Tensor | None, *, out_dtype: torch.dtype
    ) -> torch.Tensor:
        """Output for `routed` of the experts that the router chooses from `x`, or from the token ids."""
        choice = self._router(x, input_ids)
        if self._experts_in is None or self._experts_out is None:
            return self._experts(routed, *choice, out_dtype=out_dtype)
        inner = self._experts(self._experts_in(routed), *choice, out_dtype=x.dtype)
        return self._experts_out(inner, out_dtype=out_dtype)


class ExpertsInTurn:
    """Implements `Experts` with separate kernel calls for each expert; works for any kind of expert and device."""

    def __init__(self, experts: Sequence[BlockSpec], parameters: Parameters, kernels: Kernels) -> None:
        self._kernels = kernels
        self._experts = tuple(build_block(expert, parameters, kernels) for expert in experts)

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, *, out_dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """See `Experts`. Pairs of token and expert are sorted by expert, for one product per chosen expert."""
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


def compile_experts(experts: Sequence[BlockSpec], parameters: Parameters) -> Experts | None:
    """All experts as a single kernel call, if the format of their weights supports it; else None.

    NOTE: a spec is compared with one made from the fields that the call supports, so all other fields must be defaults.
    """
    gated = [expert for expert in experts if isinstance(expert, GatedSpec)]
    if len(gated) < len(experts):
        return None
    first = gated[0]
    known = (
        GatedSpec(expert.gate, expert.up, expert.down, first.activation, first.clamp) == expert for expert in gated
    )
    if not all(known):
        return None
    linears = [_take(expert, parameters) for expert in gated]
    if any(linear.scale != 1.0 for expert in linears for linear in (expert.gate, expert.up, expert.down)):
        return None
    return linears[0].gate.weight.grouped(linears, first.activation, first.clamp)


def _take(expert: GatedSpec, parameters: Parameters) -> ExpertLinears:
    gate, up, down = (parameters.linear(spec) for spec in (expert.gate, expert.up, expert.down))
    return ExpertLinears(gate, up, down)
