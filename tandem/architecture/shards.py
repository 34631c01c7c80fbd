"""Tensor-parallel shards: the part of a model that one rank of a group computes, as a `ModelSpec` of its own.

Queries, keys, values, gate, up and the head are split by outputs, which changes no sum; output and down projections by
inputs, where a rank's sum is one node of a fixed tree (`LinearSpec.sum_blocks`). Everything else is computed by all
ranks. A model that cannot be split like this is refused, never computed in another way.
"""

from dataclasses import replace

from tandem.architecture.feed_forward import FeedForwardSpec, GatedSpec, SquaredReluSpec
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
    layers = []
    for index, layer in enumerate(model.layers):
        try:
            layers.append(_shard_layer(layer, rank, num_ranks))
        except _IndivisibleError as error:
            raise _IndivisibleError(f"layer {index} has {error}") from error
    if model.vocab_size < num_ranks * _HEAD_ROWS:
        raise _IndivisibleError(f"vocab_size={model.vocab_size}, fewer than {_HEAD_ROWS} tokens a rank")
    bounds = head_bounds(model.vocab_size, num_ranks)
    return replace(model, layers=tuple(layers), head_tokens=(bounds[rank], bounds[rank + 1]))


def head_bounds(vocab_size: int, num_ranks: int) -> tuple[int, ...]:
    """The head of rank i gives logits of tokens `bounds[i]` to `bounds[i + 1] - 1`."""
    units = -(-vocab_size // _HEAD_ROWS)
    return tuple(min(vocab_size, units * part // num_ranks * _HEAD_ROWS) for part in range(num_ranks + 1))


def _shard_layer(layer: LayerSpec, rank: int, num_ranks: int) -> LayerSpec:
    if layer.beside:
        raise _IndivisibleError("several mixers side by side, which are not split yet")
    return replace(
        layer,
        mixer=_shard_mixer(layer.mixer, rank, num_ranks),
        feed_forward=_shard_feed_forward(layer.feed_forward, rank, num_ranks),
    )


def _shard_mixer(mixer: MixerSpec, rank: int, num_ranks: int) -> AttentionSpec:
    if not isinstance(mixer, AttentionSpec):
        raise _IndivisibleError(
            f"a mixer of {type(mixer).__name__.removesuffix('Spec')}, whose heads are not split yet"
        )
    if mixer.sinks is not None:
        raise _IndivisibleError("attention sinks, which are not split yet")
    if any(_spans_heads(norm, mixer.head_dim) for norm in (mixer.q_norm, mixer.k_norm)):
        raise _IndivisibleError("a norm over all heads together, whose sum is not split yet")
    if mixer.num_heads % num_ranks:
        raise _IndivisibleError(f"num_attention_heads={mixer.num_heads}, which {num_ranks} ranks do not divide")
    kv_parts = min(num_ranks, mixer.num_kv_heads)
    if mixer.num_kv_heads % kv_parts or num_ranks % kv_parts:
        raise _IndivisibleError(f"num_key_value_heads={mixer.num_kv_heads}, which {num_ranks} ranks do not divide")
    kv_heads = head_range(mixer.num_kv_heads, rank, num_ranks)
    kv_part = kv_heads.start // len(kv_heads)
    return replace(
        mixer,
        q=_by_outputs(mixer.q, rank, num_ranks),
        k=None if mixer.k is None else _by_outputs(mixer.k, kv_part, kv_parts),
        v=None if mixer.v is None else _by_outputs(mixer.v, kv_part, kv_parts),
        o=_by_inputs(mixer.o, rank, num_ranks),
        num_heads=mixer.num_heads // num_ranks,
        num_kv_heads=len(kv_heads),
    )


def _spans_heads(norm: NormSpec | None, head_dim: int) -> bool:
    return norm is not None and norm.size != head_dim


def _shard_feed_forward(spec: FeedForwardSpec | None, rank: int, num_ranks: int) -> GatedSpec:
    if spec is None or isinstance(spec, SquaredReluSpec):
        raise _IndivisibleError("no gated block, and others are not split yet")
    if not isinstance(spec, GatedSpec):
        raise _IndivisibleError("experts, which are not split yet")
    return replace(
        spec,
        gate=_by_outputs(spec.gate, rank, num_ranks),
        up=_by_outputs(spec.up, rank, num_ranks),
        down=_by_inputs(spec.down, rank, num_ranks),
    )


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


def _by_inputs(spec: LinearSpec, rank: int, num_ranks: int) -> LinearSpec:
    """The inputs of one rank: whole blocks of the sum. The bias is added once, to the sum over all ranks."""
    if spec.sum_blocks % num_ranks:
        raise _IndivisibleError(
            f"{spec.inputs} inputs of {spec.name}, which {num_ranks} ranks do not divide into parts of an even size"
        )
    size = spec.inputs // num_ranks
    weight = spec.weight_source or Source(f"{spec.name}.weight")
    return replace(spec, inputs=size, weight_source=weight.columns(rank * size, (rank + 1) * size), num_ranks=num_ranks)
