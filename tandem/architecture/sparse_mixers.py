"""Specs of sparse latent attention: latent attention (`mixers`) in which each query attends only to the tokens that an
indexer scores highest, of all tokens kept in the KV cache (DeepSeek-V3.2, GLM-5).

Layers without an indexer attend to the tokens that one of an earlier layer chose. `layers.sparse_latent_attention`, of
`tandem.models`, computes both.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from tandem.architecture.mixer_cost import MixerCost
from tandem.architecture.mixers import LatentAttentionSpec
from tandem.architecture.state import IndexedLatentSpec
from tandem.architecture.tensors import LayerNormSpec, LinearSpec, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerSpec:
    """Network that scores all tokens for a query (DeepSeek-V3.2, arXiv:2512.02556). A token's score is the sum over
    heads of `w * relu(q . k * head_dim ** -0.5)`, with a weight `w` and a query q of each head, and one key k for all
    heads. If scores are equal, the earlier token is preferred.

    Args:
        name: prefix of its tensors.
        q: from the latent of the queries to `num_heads` queries of `head_dim`, of which the first elements are rotated,
            as many as the layer's `rotary_dim`.
        k: from the hidden state to a key, which `k_norm` norms before the rotation.
        weights: from the hidden state to `num_heads` weights, in float32, times `num_heads ** -0.5`.
        is_interleaved: as in a `LatentAttentionSpec`, of the rotated elements here.
    """

    name: str
    q: LinearSpec
    k: LinearSpec
    k_norm: LayerNormSpec
    weights: LinearSpec
    num_heads: int
    head_dim: int
    is_interleaved: bool

    def tensors(self) -> Iterator[TensorSpec]:
        for part in (self.q, self.k, self.k_norm, self.weights):
            yield from part.tensors()


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseLatentAttentionSpec(LatentAttentionSpec):
    """Latent attention of each query to the `top_k` tokens that an indexer scores highest; its own token is scored too.

    Args:
        top_k: the most tokens that a query attends to.
        chosen_by: name of the indexer, this layer's own or that of an earlier one.
        indexer: None = an earlier layer has the indexer, and its choice is used (GLM-5).
    """

    top_k: int
    chosen_by: str
    indexer: IndexerSpec | None

    @classmethod
    def of(
        cls, attention: LatentAttentionSpec, *, top_k: int, chosen_by: str, indexer: IndexerSpec | None
    ) -> "SparseLatentAttentionSpec":
        """Returns `attention`, restricted to chosen tokens."""
        parts = {field.name: getattr(attention, field.name) for field in fields(attention)}
        return cls(**parts, top_k=top_k, chosen_by=chosen_by, indexer=indexer)

    def tensors(self) -> Iterator[TensorSpec]:
        yield from LatentAttentionSpec.tensors(self)
        if self.indexer is not None:
            yield from self.indexer.tensors()

    def state(self, dtype: str) -> IndexedLatentSpec:
        """Latents per token, and with an own indexer index keys, stored as `dtype`."""
        index_dim = 0 if self.indexer is None else self.indexer.head_dim
        return IndexedLatentSpec(self.rank, self.rotary_dim, dtype, index_dim)

    @property
    def cost(self) -> MixerCost:
        """Attention to at most `top_k` tokens; with an own indexer also a score of every token, of two operations for
        each element of its key and each head.
        """
        size, indexer = self.rank + self.rotary_dim, self.indexer
        return MixerCost(
            read_size=size,
            pair_flops=2 * self.num_heads * (size + self.rank),
            window=self.top_k,
            scanned_size=0 if indexer is None else indexer.head_dim,
            scan_flops=0 if indexer is None else 2 * indexer.num_heads * indexer.head_dim,
        )
