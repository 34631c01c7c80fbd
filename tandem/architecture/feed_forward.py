"""Specs of feed-forward blocks, the part of a layer that treats each token alone: gated and squared-ReLU blocks,
mixtures of experts with their routers, and sums of several blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal, TypeVar

from tandem.architecture.tensors import LinearSpec, NormSpec, TensorSpec, num_matrix_elements

Activation = Literal["silu", "gelu_tanh"]
_Named = TypeVar("_Named", LinearSpec, NormSpec, TensorSpec)


@dataclass(frozen=True, slots=True)
class Clamp:
    """Clamped activation: `(up + shift) * gate * sigmoid(alpha * gate)` with `gate` at most `limit` and `up` within
    `limit` of 0. Of gpt-oss `shift` is 1; with 0, and 1 for `alpha`, it is `silu(gate) * up` (DeepSeek-V4).
    """

    alpha: float
    limit: float
    shift: float = field(default=1.0, repr=False)  # NOTE: not in fingerprints; a family has one


@dataclass(frozen=True, slots=True)
class GatedSpec:
    """`down(activation(gate(x)) * up(x))`; `clamp` replaces the product of activation and `up`."""

    gate: LinearSpec
    up: LinearSpec
    down: LinearSpec
    activation: Activation
    clamp: Clamp | None = None

    @property
    def intermediate_size(self) -> int:
        return self.gate.outputs

    def tensors(self) -> Iterator[TensorSpec]:
        for linear in (self.gate, self.up, self.down):
            yield from linear.tensors()

    def active_tensors(self) -> Iterator[TensorSpec]:
        """Tensors that one token is multiplied by."""
        return self.tensors()

    @property
    def routed(self) -> None:
        """None, since the block has no experts."""
        return None


@dataclass(frozen=True, slots=True)
class SquaredReluSpec:
    """`down(relu(up(x)) ** 2)` (Primer, arXiv:2109.08668)."""

    up: LinearSpec
    down: LinearSpec

    @property
    def intermediate_size(self) -> int:
        return self.up.outputs

    def tensors(self) -> Iterator[TensorSpec]:
        yield from self.up.tensors()
        yield from self.down.tensors()

    def active_tensors(self) -> Iterator[TensorSpec]:
        """Tensors that one token is multiplied by."""
        return self.tensors()

    @property
    def routed(self) -> None:
        """None, since the block has no experts."""
        return None


BlockSpec = GatedSpec | SquaredReluSpec
"""Blocks that can be experts."""


class Score(StrEnum):
    """Function from a router's logits to the scores by which experts are chosen and weighted."""

    SOFTMAX = "softmax"  # over all experts
    SOFTMAX_OF_CHOSEN = "softmax of chosen"  # experts are chosen by logit
    SIGMOID = "sigmoid"
    SQRT_SOFTPLUS = "sqrt softplus"  # sqrt(ln(1 + exp(logit)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """Choice of `top_k` experts for each token; of equal scores the lowest index wins.

    Args:
        linear: map from the hidden size to one logit per expert.
        score: how logits become scores, by which experts are chosen; the scores of the chosen are their weights.
        norm: norm of the input of `linear`.
        logit_scale: multiplies the output of `linear`.
        correction: [experts], added to scores for the choice, not for the weights (DeepSeek-V3, arXiv:2412.19437).
        renormalise: the chosen weights are divided by their sum plus `epsilon`.
        scale: multiplies the weights after that.
        expert_scales: [experts], multiplies the weights at the end.
        rounded: the weights are rounded to the model's dtype.
        num_groups, top_groups: experts are divided into groups; only those of the best `top_groups` can be chosen.
        best_of_group: number of experts, the best of a group, whose scores are added to the group's score.
        table: [vocabulary, top_k] int64, the experts of each token by its id; scores then only give the weights. None =
            chosen by score (arXiv:2106.04426).
    """

    linear: LinearSpec
    top_k: int
    score: Score
    norm: NormSpec | None = None
    logit_scale: float = 1.0
    correction: TensorSpec | None = None
    expert_scales: TensorSpec | None = None
    renormalise: bool = False
    epsilon: float = 0.0
    scale: float = 1.0
    rounded: bool = False
    num_groups: int = 1
    top_groups: int = 1
    best_of_group: int = field(default=2, repr=False)  # NOTE: not in fingerprints; a family has one rule
    table: TensorSpec | None = field(default=None, repr=False)  # NOTE: fingerprints have its numbers

    @property
    def num_experts(self) -> int:
        return self.linear.outputs

    def under(self, prefix: str) -> "RouterSpec":
        """This spec with `prefix` before the names of its tensors."""
        return replace(
            self,
            linear=_under(prefix, self.linear),
            norm=None if self.norm is None else _under(prefix, self.norm),
            correction=None if self.correction is None else _under(prefix, self.correction),
            expert_scales=None if self.expert_scales is None else _under(prefix, self.expert_scales),
            table=None if self.table is None else _under(prefix, self.table),
        )

    def tensors(self) -> Iterator[TensorSpec]:
        yield from (replace(tensor, is_small=True) for tensor in self.linear.tensors())
        if self.norm is not None:
            yield from self.norm.tensors()
        yield from filter(None, (self.correction, self.expert_scales, self.table))


def _under(prefix: str, spec: _Named) -> _Named:
    return replace(spec, name=f"{prefix}.{spec.name}")


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """Sizes of a layer's routed experts: their number, those chosen per token, elements of one expert's matrices."""

    num_experts: int
    top_k: int
    expert_size: int

    def idle_share(self, num_tokens: float) -> float:
        """Expected share of experts that none of `num_tokens` tokens chooses, if choices are independent and even."""
        return float((1 - self.top_k / self.num_experts) ** num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOfExpertsSpec:
    """Weighted sum of the chosen experts' outputs, plus the output of `shared`, a block that computes every token.

    Args:
        shared_gate: map from the hidden size to 1, whose sigmoid multiplies the output of `shared`.
        before_experts: norm of the input of the experts, but not of the router.
        experts_in, experts_out: maps from the hidden size to that of the experts, and back from their sum; router and
            `shared` read the hidden state (Nemotron 3, arXiv:2512.20856).
        bounds: with it, `experts` are those of one rank; rank i has the experts that the router numbers `bounds[i]` to
            `bounds[i + 1] - 1`. None = all are here.
    """

    router: RouterSpec
    experts: tuple[BlockSpec, ...]
    shared: BlockSpec | None = None
    shared_gate: LinearSpec | None = None
    before_experts: NormSpec | None = None
    experts_in: LinearSpec | None = field(default=None, repr=False)  # NOTE: not in fingerprints, where tensors show it
    experts_out: LinearSpec | None = field(default=None, repr=False)
    bounds: tuple[int, ...] | None = field(default=None, repr=False)

    def tensors(self) -> Iterator[TensorSpec]:
        yield from self._common_tensors()
        for expert in self.experts:
            yield from expert.tensors()

    def active_tensors(self) -> Iterator[TensorSpec]:
        """Tensors used by one token, as if it had chosen the first experts."""
        yield from self._common_tensors()
        for expert in self.experts[: self.router.top_k]:
            yield from expert.tensors()

    @property
    def routed(self) -> RoutedExperts:
        return RoutedExperts(self.router.num_experts, self.router.top_k, num_matrix_elements(self.experts[0].tensors()))

    def _common_tensors(self) -> Iterator[TensorSpec]:
        yield from self.router.tensors()
        if self.shared is not None:
            yield from self.shared.tensors()
        if self.shared_gate is not None:
            yield from (replace(tensor, is_small=True) for tensor in self.shared_gate.tensors())
        if self.before_experts is not None:
            yield from self.before_experts.tensors()
        for linear in filter(None, (self.experts_in, self.experts_out)):
            yield from linear.tensors()


@dataclass(frozen=True, slots=True)
class BranchSpec:
    """A block with a norm `before` and `after` it; None = no such norm."""

    block: BlockSpec | MixtureOfExpertsSpec
    before: NormSpec | None
    after: NormSpec | None

    def norm_tensors(self) -> Iterator[TensorSpec]:
        for norm in filter(None, (self.before, self.after)):
            yield from norm.tensors()


@dataclass(frozen=True, slots=True)
class ParallelSpec:
    """Sum of the outputs of blocks with the same input. At most one of them has experts."""

    branches: tuple[BranchSpec, ...]

    def tensors(self) -> Iterator[TensorSpec]:
        for branch in self.branches:
            yield from branch.block.tensors()
            yield from branch.norm_tensors()

    def active_tensors(self) -> Iterator[TensorSpec]:
        """Tensors that one token is multiplied by."""
        for branch in self.branches:
            yield from branch.block.active_tensors()
            yield from branch.norm_tensors()

    @property
    def routed(self) -> RoutedExperts | None:
        return next((branch.block.routed for branch in self.branches if branch.block.routed is not None), None)


FeedForwardSpec = BlockSpec | MixtureOfExpertsSpec | ParallelSpec
