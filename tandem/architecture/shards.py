"""Tensor-parallel shards: the part of a model that one rank of a group computes, as a `ModelSpec` of its own.

Queries, keys, values, gate, up and the head are split by outputs, which changes no sum; output and down projections by
inputs, where a rank's sum is one node of a fixed tree (`LinearSpec.sum_blocks`). Of a mixture each rank has whole
experts, whose outputs are added in their order. Everything else is computed by all ranks. A model that cannot be split
like this is refused, never computed in another way.
"""

from dataclasses import dataclass, replace

from tandem.architecture.feed_forward import (
    BlockSpec,
    BranchSpec,
    FeedForwardSpec,
    MixtureOfExpertsSpec,
    ParallelSpec,
    SquaredReluSpec,
)
from tandem.architecture.mixers import AttentionSpec, MixerSpec
from tandem.architecture.model import LayerSpec, ModelSpec
from tandem.architecture.rectangles import head_range
from tandem.architecture.tensors import MAX_RANKS, LinearSpec, NormSpec, Source
from tandem.core.errors import ConfigurationError

WIDTHS = tuple(1 << level for level in range(MAX_RANKS.bit_length()))
"""Numbers of ranks that a group may have."""

_HEAD_ROWS = 16  # of the head that begin together, so that each part can be packed


class _IndivisibleError(Exception):
    """Why a model has no shards of a width."""


def shard_model(model: ModelSpec, rank: int, num_ranks: int) -> ModelSpec:
    """The part of `model` that rank `rank` of `num_ranks` computes. Its head gives logits of `head_tokens` alone.

    The parts of all ranks have every number of a split tensor once; of fewer KV heads than ranks each has a copy in
    several. Its fingerprint, names and layers are the whole model's.

    Raises:
        ConfigurationError: the model cannot be split among so many; the message says why, and what can be had.
    """
    assert 0 <= rank < num_ranks
    if num_ranks not in WIDTHS:
        raise ConfigurationError(f"tp={num_ranks} is no number of ranks; choose one of {_named(WIDTHS)}")
    try:
        return _shard(model, rank, num_ranks)
    except _IndivisibleError as error:
        fitting = tuple(width for width in WIDTHS if _fits(model, width))
        raise ConfigurationError(
            f"tp={num_ranks} cannot serve this {model.family} model: {error}; what can be had: tp={_named(fitting)}"
        ) from error


def _named(widths: tuple[int, ...]) -> str:
    return ", ".join(map(str, widths))


def _fits(model: ModelSpec, num_ranks: int) -> bool:
    try:
        _shard(model, 0, num_ranks)
    except _IndivisibleError:
        return False
    return True


def _shard(model: ModelSpec, rank: int, num_ranks: int) -> ModelSpec:
    if num_ranks == 1:
        return model
    part = _Part(rank, num_ranks)
    layers = []
    for index, layer in enumerate(model.layers):
        try:
            layers.append(part.of_layer(layer))
        except _IndivisibleError as error:
            raise _IndivisibleError(f"layer {index} has {error}") from error
    if model.vocab_size < num_ranks * _HEAD_ROWS:
        raise _IndivisibleError(f"vocab_size={model.vocab_size}, fewer than {_HEAD_ROWS} tokens a rank")
    bounds = head_bounds(model.vocab_size, num_ranks)
    return replace(model, layers=tuple(layers), head_tokens=(bounds[rank], bounds[rank + 1]))


def head_bounds(vocab_size: int, num_ranks: int) -> tuple[int, ...]:
    """The head of rank i gives logits of tokens `bounds[i]` to `bounds[i + 1] - 1`."""
    return _bounds(vocab_size, num_ranks, _HEAD_ROWS)


def _bounds(size: int, num_parts: int, unit: int) -> tuple[int, ...]:
    """Of parts that are as equal as can be, all but the last of whole units: where each begins, and the end."""
    units = -(-size // unit)
    return tuple(min(size, units * part // num_parts * unit) for part in range(num_parts + 1))


@dataclass(frozen=True, slots=True)
class _Part:
    """What rank `rank` of `num_ranks` computes of each block."""

    rank: int
    num_ranks: int

    def of_layer(self, layer: LayerSpec) -> LayerSpec:
        if layer.beside:
            raise _IndivisibleError("several mixers side by side, which are not split yet")
        return replace(
            layer,
            mixer=self._of_attention(layer.mixer),
            feed_forward=self._of_feed_forward(layer.feed_forward),
        )

    def _of_attention(self, mixer: MixerSpec) -> AttentionSpec:
        if not isinstance(mixer, AttentionSpec):
            raise _IndivisibleError(
                f"a mixer of {type(mixer).__name__.removesuffix('Spec')}, whose heads are not split yet"
            )
        if mixer.sinks is not None:
            raise _IndivisibleError("attention sinks, which are not split yet")
        if any(_spans_heads(norm, mixer.head_dim) for norm in (mixer.q_norm, mixer.k_norm)):
            raise _IndivisibleError("a norm over all heads together, whose sum is not split yet")
        kv_parts = min(self.num_ranks, mixer.num_kv_heads)
        if mixer.num_kv_heads % kv_parts or self.num_ranks % kv_parts:
            raise _IndivisibleError(
                f"num_key_value_heads={mixer.num_kv_heads}, which {self.num_ranks} ranks do not divide"
            )
        kv_heads = head_range(mixer.num_kv_heads, self.rank, self.num_ranks)
        kv_part = kv_heads.start // len(kv_heads)
        return replace(
            mixer,
            q=self._by_outputs(mixer.q),
            k=None if mixer.k is None else _by_outputs(mixer.k, kv_part, kv_parts),
            v=None if mixer.v is None else _by_outputs(mixer.v, kv_part, kv_parts),
            o=self._by_inputs(mixer.o),
            num_heads=self._heads(mixer.num_heads),
            num_kv_heads=len(kv_heads),
        )

    def _heads(self, num_heads: int) -> int:
        if num_heads % self.num_ranks:
            raise _IndivisibleError(f"num_attention_heads={num_heads}, which {self.num_ranks} ranks do not divide")
        return num_heads // self.num_ranks

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
        """Whole experts, so that none of their sums is split, and a part of the block that every token passes."""
        num_experts = len(spec.experts)
        if num_experts < self.num_ranks:
            raise _IndivisibleError(f"{num_experts} experts, fewer than {self.num_ranks} ranks")
        bounds = _bounds(num_experts, self.num_ranks, 1)
        return replace(
            spec,
            experts=spec.experts[bounds[self.rank] : bounds[self.rank + 1]],
            bounds=bounds,
            shared=None if spec.shared is None else self._of_block(spec.shared),
        )

    def _of_block(self, spec: BlockSpec) -> BlockSpec:
        if isinstance(spec, SquaredReluSpec):
            return replace(spec, up=self._by_outputs(spec.up), down=self._by_inputs(spec.down))
        return replace(
            spec, gate=self._by_outputs(spec.gate), up=self._by_outputs(spec.up), down=self._by_inputs(spec.down)
        )

    def _by_outputs(self, spec: LinearSpec) -> LinearSpec:
        return _by_outputs(spec, self.rank, self.num_ranks)

    def _by_inputs(self, spec: LinearSpec) -> LinearSpec:
        """The inputs of one rank: whole blocks of the sum. The bias is added once, to the sum over all ranks."""
        if spec.sum_blocks % self.num_ranks:
            raise _IndivisibleError(
                f"{spec.inputs} inputs of {spec.name}, which {self.num_ranks} ranks do not divide into parts of an "
                "even size"
            )
        size = spec.inputs // self.num_ranks
        weight = spec.weight_source or Source(f"{spec.name}.weight")
        columns = weight.columns(self.rank * size, (self.rank + 1) * size)
        return replace(spec, inputs=size, weight_source=columns, num_ranks=self.num_ranks)


def _spans_heads(norm: NormSpec | None, head_dim: int) -> bool:
    return norm is not None and norm.size != head_dim


def _by_outputs(spec: LinearSpec, part: int, num_parts: int) -> LinearSpec:
    """Part `part` of the outputs, with their biases."""
    if spec.outputs % num_parts:
        raise _IndivisibleError(f"{spec.outputs} outputs of {spec.name}, which {num_parts} ranks do not divide")
    size = spec.outputs // num_parts
    rows = part * size, (part + 1) * size
    weight = spec.weight_source or Source(f"{spec.name}.weight")
    bias = spec.bias_source or Source(f"{spec.name}.bias")
    return replace(
        spec,
        outputs=size,
        weight_source=weight.rows(*rows),
        bias_source=bias.rows(*rows) if spec.bias else spec.bias_source,
        num_ranks=num_parts,
    )
