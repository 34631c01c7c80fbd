"""Tensor-parallel shards: the part of a model that one rank of a group computes, as a `ModelSpec` of its own.

Maps to heads, gate, up and the output head are split by outputs, which changes no sum. Output and down projections are
split by inputs, with a rank's partial sum a node of a fixed tree (`LinearSpec.sum_blocks`). Quantised ones ("coded")
are split by outputs, and each rank gets all inputs. A rank has whole experts, whose outputs are added in order. Every
rank computes the rest. A model that cannot be split is refused.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from tandem.architecture.feed_forward import (
    BlockSpec,
    BranchSpec,
    FeedForwardSpec,
    MixtureOfExpertsSpec,
    ParallelSpec,
    SquaredReluSpec,
)
from tandem.architecture.mixer_shards import split_mixer
from tandem.architecture.model import LayerSpec, ModelSpec
from tandem.architecture.split import IndivisibleError, RankPart
from tandem.architecture.tensors import MAX_RANKS
from tandem.core.errors import ConfigurationError

WIDTHS = tuple(1 << level for level in range(MAX_RANKS.bit_length()))  # numbers of ranks that may divide a model
"""Numbers of ranks that a group may have."""

_HEAD_ROWS = 16  # of the head that begin together, so that each part can be packed


def shard_model(model: ModelSpec, rank: int, num_ranks: int, *, coded: Collection[str] = frozenset()) -> ModelSpec:
    """The part of `model` that rank `rank` of `num_ranks` computes. Its output head only gives logits of the tokens in
    `head_tokens`. `coded`: names of the quantised weights.

    Each number of a split tensor is on exactly one rank, except that with fewer KV heads than ranks several ranks have
    copies of a head. Fingerprint, names and the number of layers are the whole model's.

    Raises:
        ConfigurationError: the model cannot be split among so many; the message says why, and what can be had.
    """
    assert 0 <= rank < num_ranks
    if num_ranks not in WIDTHS:
        raise ConfigurationError(f"tp={num_ranks} is no number of ranks; choose one of {_named(WIDTHS)}")
    try:
        return _shard(model, rank, num_ranks, coded)
    except IndivisibleError as error:
        fitting = tuple(width for width in WIDTHS if _fits(model, width, coded))
        raise ConfigurationError(
            f"tp={num_ranks} cannot serve this {model.family} model: {error}; what can be had: tp={_named(fitting)}"
        ) from error


def _named(widths: tuple[int, ...]) -> str:
    return ", ".join(map(str, widths))


def _fits(model: ModelSpec, num_ranks: int, coded: Collection[str]) -> bool:
    try:
        _shard(model, 0, num_ranks, coded)
    except IndivisibleError:
        return False
    return True


def _shard(model: ModelSpec, rank: int, num_ranks: int, coded: Collection[str]) -> ModelSpec:
    if num_ranks == 1:
        return model
    shard = _Shard(RankPart(rank, num_ranks, coded))
    layers = []
    for index, layer in enumerate(model.layers):
        try:
            layers.append(shard.of_layer(layer))
        except IndivisibleError as error:
            raise IndivisibleError(f"layer {index} has {error}") from error
    if model.vocab_size < num_ranks * _HEAD_ROWS:
        raise IndivisibleError(f"vocab_size={model.vocab_size}, fewer than {_HEAD_ROWS} tokens a rank")
    bounds = head_bounds(model.vocab_size, num_ranks)
    return replace(model, layers=tuple(layers), head_tokens=(bounds[rank], bounds[rank + 1]))


def head_bounds(vocab_size: int, num_ranks: int) -> tuple[int, ...]:
    """Boundaries of the vocabulary's parts: rank i gives logits of tokens `bounds[i]` to `bounds[i + 1] - 1`."""
    return _bounds(vocab_size, num_ranks, _HEAD_ROWS)


def expert_bounds(num_experts: int, num_ranks: int) -> tuple[int, ...]:
    """Boundaries of the ranks' experts in a layer: rank i has experts `bounds[i]` to `bounds[i + 1] - 1`."""
    return _bounds(num_experts, num_ranks, 1)


def _bounds(size: int, num_parts: int, unit: int) -> tuple[int, ...]:
    """Starts of `num_parts` parts of `size`, of equal numbers of units (the last may be less), and the end."""
    units = -(-size // unit)
    return tuple(min(size, units * part // num_parts * unit) for part in range(num_parts + 1))


@dataclass(frozen=True, slots=True)
class _Shard:
    """Reduces each layer to the part that one rank computes."""

    part: RankPart

    def of_layer(self, layer: LayerSpec) -> LayerSpec:
        return replace(
            layer,
            mixer=split_mixer(layer.mixer, self.part),
            parallel_mixers=tuple(split_mixer(mixer, self.part) for mixer in layer.parallel_mixers),
            feed_forward=self._of_feed_forward(layer.feed_forward),
        )

    def _of_feed_forward(self, spec: FeedForwardSpec | None) -> FeedForwardSpec | None:
        if spec is None:
            return None
        if isinstance(spec, MixtureOfExpertsSpec):
            return self._of_mixture(spec)
        if isinstance(spec, ParallelSpec):
            return replace(spec, branches=tuple(self._of_branch(branch) for branch in spec.branches))
        return self._of_block(spec)

    def _of_branch(self, branch: BranchSpec) -> BranchSpec:
        block = branch.block
        return replace(
            branch, block=self._of_mixture(block) if isinstance(block, MixtureOfExpertsSpec) else self._of_block(block)
        )

    def _of_mixture(self, spec: MixtureOfExpertsSpec) -> MixtureOfExpertsSpec:
        """Whole experts for each rank, so that none of their sums is split, and a part of the shared block."""
        num_experts = len(spec.experts)
        if num_experts < self.part.num_ranks:
            raise IndivisibleError(f"{num_experts} experts, fewer than {self.part.num_ranks} ranks")
        bounds = expert_bounds(num_experts, self.part.num_ranks)
        return replace(
            spec,
            experts=spec.experts[bounds[self.part.rank] : bounds[self.part.rank + 1]],
            bounds=bounds,
            shared=None if spec.shared is None else self._of_block(spec.shared),
        )

    def _of_block(self, spec: BlockSpec) -> BlockSpec:
        if isinstance(spec, SquaredReluSpec):
            return replace(spec, up=self.part.by_outputs(spec.up), down=self.part.by_inputs(spec.down))
        return replace(
            spec,
            gate=self.part.by_outputs(spec.gate),
            up=self.part.by_outputs(spec.up),
            down=self.part.by_inputs(spec.down),
        )
