"""Router: chooses experts for each token by the rule of a `RouterSpec`. A token's choice does not depend on others."""

from collections.abc import Callable

import torch

from tandem.architecture.feed_forward import RouterSpec, Score
from tandem.architecture.tensors import TensorSpec
from tandem.compute.ops import ExpertChoice, Kernels
from tandem.core.errors import CorruptCheckpointError
from tandem.models.layers.norm import Norm
from tandem.models.layers.sigmoid import rowwise_sigmoid, rowwise_softplus
from tandem.models.parameters import Parameters


class ExpertRouter:
    """Computes a `RouterSpec` with the tensors that it names."""

    def __init__(self, spec: RouterSpec, parameters: Parameters, kernels: Kernels) -> None:
        self._spec = spec
        self._linear = parameters.linear(spec.linear)
        self._norm = Norm.take_optional(spec.norm, parameters, kernels)
        self._correction, self._expert_scales = _tensors(spec, parameters)
        self._table = None if spec.table is None else _checked(spec.table, spec.num_experts, parameters)
        self._choose = compile_choice(spec, parameters, kernels) or self._choose_in_steps

    def __call__(self, x: torch.Tensor, input_ids: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """`x` [num_tokens, hidden] -> weights, float32, and experts, int64, both [num_tokens, top_k].

        `input_ids`: the token ids, needed if the experts are looked up in a table by token.
        """
        normed = x if self._norm is None else self._norm(x)
        dtype = self._linear.weight.dtype
        logits = self._linear(normed if dtype is None else normed.to(dtype))
        if self._table is None:
            return self._choose(logits, x.dtype)
        assert input_ids is not None, "experts are those of the tokens"
        return self._weigh(self._score(logits), self._table.index_select(0, input_ids), x.dtype)

    def _choose_in_steps(self, logits: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The choice in single PyTorch operations, see `ExpertChoice`."""
        spec, scores = self._spec, self._score(logits)
        wanted = scores if self._correction is None else scores + self._correction
        if spec.num_groups > 1:
            wanted = _within_best_groups(wanted, spec)
        return self._weigh(scores, _best(wanted, spec.top_k), dtype)

    def _score(self, logits: torch.Tensor) -> torch.Tensor:
        return _SCORES[self._spec.score](logits.float() * self._spec.logit_scale)

    def _weigh(
        self, scores: torch.Tensor, experts: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights of the chosen experts, and the experts."""
        spec = self._spec
        chosen = scores.gather(1, experts)
        if spec.score is Score.SOFTMAX_OF_CHOSEN:
            chosen = chosen.to(dtype).softmax(1).float() if spec.rounded else chosen.softmax(1)
        if spec.renormalise:
            chosen = chosen / (chosen.sum(1, keepdim=True) + spec.epsilon)
        chosen = chosen * spec.scale
        if self._expert_scales is not None:
            chosen = chosen * self._expert_scales[experts]
        return chosen.to(dtype).float() if spec.rounded else chosen, experts


def compile_choice(spec: RouterSpec, parameters: Parameters, kernels: Kernels) -> ExpertChoice | None:
    """The choice as one kernel call, if the kernels have one for this rule; else None."""
    return None if spec.table is not None else kernels.expert_choice(spec, *_tensors(spec, parameters))


def _checked(table: TensorSpec, num_experts: int, parameters: Parameters) -> torch.Tensor:
    """The table of experts; raises `CorruptCheckpointError` if it names an expert that does not exist."""
    found = parameters.tensors[table.name]
    low, high = found.aminmax()
    if low < 0 or high >= num_experts:
        raise CorruptCheckpointError(
            f"{table.name} has experts from {int(low)} to {int(high)}, and there are {num_experts}; "
            "download the weights again"
        )
    return found


def _tensors(spec: RouterSpec, parameters: Parameters) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Correction and scales of the experts, both [num_experts] float32; None = none."""
    correction = None if spec.correction is None else parameters.tensors[spec.correction.name].float()
    return correction, None if spec.expert_scales is None else parameters.tensors[spec.expert_scales.name].float()


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` largest scores of each row, in falling order; of equal ones the lowest index first."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _within_best_groups(scores: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """The scores, -inf outside each row's best groups."""
    grouped = scores.view(len(scores), spec.num_groups, scores.shape[1] // spec.num_groups)
    totals = grouped.topk(spec.best_of_group, dim=2).values.sum(2)  # [num_tokens, num_groups]
    is_out = torch.ones_like(totals, dtype=torch.bool).scatter_(1, _best(totals, spec.top_groups), False)
    return grouped.masked_fill(is_out.unsqueeze(2), -torch.inf).flatten(1)


def _as_they_are(logits: torch.Tensor) -> torch.Tensor:
    return logits


_SCORES: dict[Score, Callable[[torch.Tensor], torch.Tensor]] = {
    Score.SOFTMAX: lambda logits: logits.softmax(1),
    Score.SOFTMAX_OF_CHOSEN: _as_they_are,
    Score.SIGMOID: rowwise_sigmoid,
    Score.SQRT_SOFTPLUS: lambda logits: rowwise_softplus(logits).sqrt(),
}
