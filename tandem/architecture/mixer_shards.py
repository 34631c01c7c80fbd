"""Tensor-parallel splits of token mixers: for each kind of mixer, the part that one rank of a group computes.

A rank has some of the heads. Every rank computes all that the heads share: latents, index keys and the tokens chosen by
them. A norm over all heads takes elements from all ranks. A convolution without heads is divided by channels.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from tandem.architecture.block_mixers import BlockAttentionSpec, CompressedAttentionSpec
from tandem.architecture.entry_mixers import EntryAttentionSpec, SharedRowAttentionSpec
from tandem.architecture.mixers import AttentionSpec, LatentAttentionSpec, MixerSpec
from tandem.architecture.rectangles import head_range
from tandem.architecture.recurrent_mixers import ConvSpec, LinearRecurrenceSpec, SelectiveScanSpec, ShortConvSpec
from tandem.architecture.sparse_mixers import SparseLatentAttentionSpec
from tandem.architecture.split import IndivisibleError, RankPart, by_outputs
from tandem.architecture.tensors import MAX_RANKS, LinearSpec, NormSpec, Source, TensorSpec


def split_mixer(mixer: MixerSpec, part: RankPart) -> MixerSpec:
    """The part of `mixer` that a rank computes.

    Raises:
        IndivisibleError: the mixer cannot be divided among so many ranks.
    """
    split = _SPLITS.get(type(mixer))
    if split is None:
        raise IndivisibleError(f"a mixer of {type(mixer).__name__.removesuffix('Spec')}, whose heads are not split yet")
    found: MixerSpec = split(mixer, part)
    return found


def _split_attention(mixer: AttentionSpec, part: RankPart) -> AttentionSpec:
    """Queries and KV heads are divided; with fewer KV heads than ranks, neighbouring ranks have the same KV head."""
    num_heads = part.share(mixer.num_heads, "num_attention_heads")
    kv_parts = min(part.num_ranks, mixer.num_kv_heads)
    if mixer.num_kv_heads % kv_parts or part.num_ranks % kv_parts:
        raise IndivisibleError(f"num_key_value_heads={mixer.num_kv_heads}, which {part.num_ranks} ranks do not divide")
    heads = range(part.rank * num_heads, (part.rank + 1) * num_heads)
    kv_heads = head_range(mixer.num_kv_heads, part.rank, part.num_ranks)
    kv_part = kv_heads.start // len(kv_heads)
    return replace(
        mixer,
        q=part.by_outputs(mixer.q),
        k=None if mixer.k is None else by_outputs(mixer.k, kv_part, kv_parts),
        v=None if mixer.v is None else by_outputs(mixer.v, kv_part, kv_parts),
        o=part.by_inputs(mixer.o),
        num_heads=num_heads,
        num_kv_heads=len(kv_heads),
        q_norm=_norm_of(mixer.q_norm, heads, mixer.head_dim),
        k_norm=_norm_of(mixer.k_norm, kv_heads, mixer.head_dim),
        sinks=None if mixer.sinks is None else _along_first_axis(mixer.sinks, heads),
    )


def _split_latent_attention(mixer: LatentAttentionSpec, part: RankPart) -> LatentAttentionSpec:
    """Every rank has the whole latents, the maps to them, and the indexer; only maps to heads are divided."""
    return replace(
        mixer,
        q=part.by_outputs(mixer.q),
        kv_b=part.by_outputs(mixer.kv_b),
        o=part.by_inputs(mixer.o),
        num_heads=part.share(mixer.num_heads, "num_attention_heads"),
    )


def _split_shared_rows(mixer: SharedRowAttentionSpec, part: RankPart) -> SharedRowAttentionSpec:
    """A rank has whole groups of heads, so that no group's output map is split. Every rank has all rows and entries,
    and the indexer that chooses entries.
    """
    num_groups = part.share(len(mixer.o_groups), "o_groups")
    num_heads = part.share(mixer.num_heads, "num_attention_heads")
    return replace(
        mixer,
        q=part.by_outputs(mixer.q),
        o_groups=mixer.o_groups[part.rank * num_groups : (part.rank + 1) * num_groups],
        o=part.by_inputs(mixer.o),
        num_heads=num_heads,
        sinks=_along_first_axis(mixer.sinks, range(part.rank * num_heads, (part.rank + 1) * num_heads)),
    )


def _split_recurrence(mixer: LinearRecurrenceSpec, part: RankPart) -> LinearRecurrenceSpec:
    """With fewer groups of queries and keys than ranks, neighbouring ranks have the same group. The convolution's
    channels are divided part by part (q, k, v), and so are the maps to them.
    """
    num_heads, groups = part.share(mixer.num_heads, "number of recurrent heads"), mixer.num_groups
    if groups % part.num_ranks and part.num_ranks % groups:
        raise IndivisibleError(f"{groups} groups of recurrent heads, which {part.num_ranks} ranks do not divide")
    heads = range(part.rank * num_heads, (part.rank + 1) * num_heads)
    num_decays = mixer.a.outputs // mixer.num_heads  # of a head, one or as many as its columns
    kept = [head_range(count, part.rank, part.num_ranks) for count, _ in mixer.conv_parts]
    ends = list(accumulate(count * size for count, size in mixer.conv_parts))
    rows = [
        range(end - count * size + each.start * size, end - count * size + each.stop * size)
        for each, (count, size), end in zip(kept, mixer.conv_parts, ends, strict=True)
    ]
    if sum(map(len, rows)) % 2:
        raise IndivisibleError("an odd number of channels of a convolution for each rank")
    return replace(
        mixer,
        qkv=tuple(_split_linears(mixer.qkv, mixer.conv_order, rows, part.num_ranks)),
        gate=part.by_outputs(mixer.gate),
        a=part.by_outputs(mixer.a),
        b=None if mixer.b is None else part.by_outputs(mixer.b),
        conv=_split_conv(mixer.conv, mixer.conv_order, rows),
        a_log=_of_heads(mixer.a_log, heads),
        a_bias=_along_first_axis(mixer.a_bias, range(heads.start * num_decays, heads.stop * num_decays)),
        skip=None if mixer.skip is None else _along_first_axis(mixer.skip, heads),
        out=part.by_inputs(mixer.out),
        out_norm=_output_norm(mixer, heads),
        num_heads=num_heads,
        num_groups=len(head_range(groups, part.rank, part.num_ranks)),
    )


def _split_short_conv(mixer: ShortConvSpec, part: RankPart) -> ShortConvSpec:
    """Channels are independent. Those of b, c and x are consecutive rows of one map."""
    channels = mixer.conv.channels
    if channels % MAX_RANKS or (channels // part.num_ranks) % 2:
        raise IndivisibleError(f"a convolution of {channels} channels, of which ranks have no even number each")
    size = channels // part.num_ranks
    kept = range(part.rank * size, (part.rank + 1) * size)
    rows = [range(first + kept.start, first + kept.stop) for first in range(0, 3 * channels, channels)]
    return replace(
        mixer,
        parts=tuple(_split_linears((mixer.project,), "bcx", rows, part.num_ranks)),
        conv=_split_conv(mixer.conv, "x", [kept]),
        out=part.by_inputs(mixer.out),
    )


def _split_selective_scan(mixer: SelectiveScanSpec, part: RankPart) -> SelectiveScanSpec:
    """Channels are independent except for the terms, which are sums over all channels."""
    size = part.share(mixer.conv.channels, "channels of a selective scan")
    if size % 2:
        raise IndivisibleError("an odd number of channels of a convolution for each rank")
    kept = range(part.rank * size, (part.rank + 1) * size)
    return replace(
        mixer,
        x=part.by_outputs(mixer.x),
        gate=part.by_outputs(mixer.gate),
        conv=_split_conv(mixer.conv, "x", [kept]),
        terms=part.by_inputs(mixer.terms),
        steps=part.by_outputs(mixer.steps),
        a_log=_along_first_axis(mixer.a_log, kept),
        a_bias=_along_first_axis(mixer.a_bias, kept),
        skip=_along_first_axis(mixer.skip, kept),
        out=part.by_inputs(mixer.out),
    )


def _split_block_attention(mixer: BlockAttentionSpec, part: RankPart) -> BlockAttentionSpec:
    """Each KV head chooses blocks by its own index query; every rank has all index keys."""
    indexer = mixer.indexer
    if indexer is not None:
        kv_parts = min(part.num_ranks, mixer.attention.num_kv_heads)
        kv_part = part.rank * kv_parts // part.num_ranks
        indexer = replace(indexer, q=by_outputs(indexer.q, kv_part, kv_parts))
    return replace(mixer, attention=_split_attention(mixer.attention, part), indexer=indexer)


def _split_compressed_attention(mixer: CompressedAttentionSpec, part: RankPart) -> CompressedAttentionSpec:
    """A KV head's choice is a sum over all heads that share it, so these stay on one rank. `gates` gives three kinds of
    gates, each for all heads; the rank has its heads' gates of each kind.
    """
    attention = mixer.attention
    part.share(attention.num_kv_heads, "num_key_value_heads, whose choices of blocks are sums over heads,")
    split = _split_attention(attention, part)
    gates = mixer.gates
    weight = gates.weight_source or Source(f"{gates.name}.weight")
    kept = replace(
        weight, start=part.rank * split.num_heads, stop=(part.rank + 1) * split.num_heads, period=attention.num_heads
    )
    assert weight.is_whole, "a map of its own"
    assert not gates.bias, "whose parts have none"
    return replace(
        mixer,
        attention=split,
        gates=replace(gates, outputs=3 * split.num_heads, weight_source=kept, num_ranks=part.num_ranks),
    )


def _output_norm(mixer: LinearRecurrenceSpec, heads: range) -> NormSpec | None:
    """A norm of each head is the same for all; a norm over groups of channels may need elements of other ranks."""
    norm = mixer.out_norm
    if norm is None or mixer.gating.is_by_head:
        return norm
    if norm.size != mixer.num_heads * mixer.value_dim:
        raise IndivisibleError(f"{norm.name}, whose groups share {norm.size} factors, which is not split yet")
    return replace(norm, within=(heads.start * mixer.value_dim, heads.stop * mixer.value_dim))


def _split_linears(
    linears: tuple[LinearSpec, ...], order: str, rows: Sequence[range], num_ranks: int
) -> Iterator[LinearSpec]:
    """One map for each part of a convolution's channels. `rows`: outputs of each part, counted over all `linears`."""
    offset = 0
    for index, (name, kept) in enumerate(zip(order, rows, strict=True)):
        linear = linears[index if len(linears) > 1 else 0]
        weight = linear.weight_source or Source(f"{linear.name}.weight")
        bias = linear.bias_source or Source(f"{linear.name}.bias")
        first, end = kept.start - offset, kept.stop - offset
        yield replace(
            linear,
            name=linear.name if len(linears) > 1 else f"{linear.name}.{name}",
            outputs=len(kept),
            weight_source=weight.rows(first, end),
            bias_source=bias.rows(first, end) if linear.bias else linear.bias_source,
            num_ranks=num_ranks,
        )
        offset += linear.outputs if len(linears) > 1 else 0


def _split_conv(conv: ConvSpec, order: str, rows: Sequence[range]) -> ConvSpec:
    return replace(
        conv,
        weights=tuple(_split_vector(conv.weights, order, rows)),
        bias=None,
        biases=tuple(_split_vector(conv.all_biases, order, rows)),
    )


def _split_vector(tensors: tuple[TensorSpec, ...], order: str, rows: Sequence[range]) -> Iterator[TensorSpec]:
    """One tensor for each part of a convolution's channels, cut along the first axis."""
    offset = 0
    for index, (name, kept) in enumerate(zip(order, rows, strict=True) if tensors else ()):
        tensor = tensors[index if len(tensors) > 1 else 0]
        part = _along_first_axis(tensor, range(kept.start - offset, kept.stop - offset))
        yield part if len(tensors) > 1 else replace(part, name=f"{tensor.name}.{name}")
        offset += tensor.shape[0] if len(tensors) > 1 else 0


_SPLITS: Mapping[type, Callable[[Any, RankPart], Any]] = {
    AttentionSpec: _split_attention,
    LatentAttentionSpec: _split_latent_attention,
    SparseLatentAttentionSpec: _split_latent_attention,
    SharedRowAttentionSpec: _split_shared_rows,
    EntryAttentionSpec: _split_shared_rows,
    LinearRecurrenceSpec: _split_recurrence,
    ShortConvSpec: _split_short_conv,
    SelectiveScanSpec: _split_selective_scan,
    BlockAttentionSpec: _split_block_attention,
    CompressedAttentionSpec: _split_compressed_attention,
}


def _norm_of(norm: NormSpec | None, heads: range, head_dim: int) -> NormSpec | None:
    """A norm of each head is the same for every head; a norm over all heads needs elements of other ranks."""
    if norm is None or norm.size == head_dim:
        return norm
    return replace(norm, within=(heads.start * head_dim, heads.stop * head_dim))


def _along_first_axis(tensor: TensorSpec, kept: range) -> TensorSpec:
    """Elements `kept` of a vector, or rows `kept` of a matrix."""
    source = tensor.source or Source(tensor.name)
    return replace(tensor, shape=(len(kept), *tensor.shape[1:]), source=source.rows(kept.start, kept.stop))


def _of_heads(tensor: TensorSpec, heads: range) -> TensorSpec:
    """Elements of `heads` in a vector, or in a tensor [1, 1, heads, 1] as in Kimi-Linear."""
    if len(tensor.shape) == 1:
        return _along_first_axis(tensor, heads)
    assert tensor.shape[:2] + tensor.shape[3:] == (1, 1, 1)
    source = replace(tensor.source or Source(tensor.name), index=0, transposed=True)
    return replace(tensor, shape=(1, 1, len(heads)), source=source.columns(heads.start, heads.stop))
