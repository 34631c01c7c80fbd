"""Parts of token mixers that one rank of a tensor-parallel group computes: some of the heads, by the kind of mixer.

What all heads share is computed by every rank: latents, and index keys with what they choose. A norm over all heads
takes the elements of all ranks.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tandem.architecture.mixers import AttentionSpec, LatentAttentionSpec, MixerSpec
from tandem.architecture.rectangles import head_range
from tandem.architecture.sparse_mixers import SparseLatentAttentionSpec
from tandem.architecture.split import IndivisibleError, Part, by_outputs
from tandem.architecture.tensors import NormSpec, Source, TensorSpec


def split_mixer(mixer: MixerSpec, part: Part) -> MixerSpec:
    """What a rank computes of `mixer`.

    Raises:
        IndivisibleError: it has no such part.
    """
    split = _SPLITS.get(type(mixer))
    if split is None:
        raise IndivisibleError(f"a mixer of {type(mixer).__name__.removesuffix('Spec')}, whose heads are not split yet")
    found: MixerSpec = split(mixer, part)
    return found


def _split_attention(mixer: AttentionSpec, part: Part) -> AttentionSpec:
    """Of fewer KV heads than ranks, neighbours have the same."""
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
        sinks=None if mixer.sinks is None else _entries(mixer.sinks, heads),
    )


def _split_latent_attention(mixer: LatentAttentionSpec, part: Part) -> LatentAttentionSpec:
    """Latents and what is made of them before there are heads are whole on every rank; so is an indexer."""
    return replace(
        mixer,
        q=part.by_outputs(mixer.q),
        kv_b=part.by_outputs(mixer.kv_b),
        o=part.by_inputs(mixer.o),
        num_heads=part.share(mixer.num_heads, "num_attention_heads"),
    )


_SPLITS: Mapping[type, Callable[[Any, Part], Any]] = {
    AttentionSpec: _split_attention,
    LatentAttentionSpec: _split_latent_attention,
    SparseLatentAttentionSpec: _split_latent_attention,
}


def _norm_of(norm: NormSpec | None, heads: range, head_dim: int) -> NormSpec | None:
    """A norm of each head is that of any; one over all heads takes what other ranks have."""
    if norm is None or norm.size == head_dim:
        return norm
    return replace(norm, within=(heads.start * head_dim, heads.stop * head_dim))


def _entries(tensor: TensorSpec, kept: range) -> TensorSpec:
    """Those of a vector."""
    source = tensor.source or Source(tensor.name)
    return replace(tensor, shape=(len(kept),), source=source.rows(kept.start, kept.stop))
