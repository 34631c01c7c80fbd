"""Token mixers whose queries attend to some blocks of tokens that they choose, of all K and V that were kept.

Blocks of tokens here are the model's own, whatever the block size of the KV cache.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tandem.architecture.mixer_cost import MixerCost
from tandem.architecture.mixers import BlockMixer
from tandem.architecture.state import ChosenKVSpec
from tandem.architecture.tensors import LinearSpec, NormSpec, TensorSpec

MEANS, COMPRESSED_KEYS, COMPRESSED_VALUES = "means", "compressed keys", "compressed values"
"""Planes of summaries."""


@dataclass(frozen=True, slots=True)
class BlockChoice:
    """Of all blocks of `size` tokens up to its own a query chooses the `top_k` of the highest scores, of equal ones the
    earlier; the first `num_first` and the last `num_last`, its own included, are among them whatever their scores.
    """

    size: int
    top_k: int
    num_first: int = 0
    num_last: int = 1

    @property
    def num_tokens(self) -> int:
        """The most tokens that are chosen."""
        return self.size * self.top_k


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockIndexerSpec:
    """Scores of MiniMax-M3: a block's is the highest product of an index query with the index keys of its tokens. Each
    KV head has an index query of its own; keys are shared. Both are normed, and rotated as the attention's.
    """

    q: LinearSpec
    k: LinearSpec
    q_norm: NormSpec
    k_norm: NormSpec
    head_dim: int

    def tensors(self) -> Iterator[TensorSpec]:
        for part in (self.q, self.k, self.q_norm, self.k_norm):
            yield from part.tensors()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockAttentionSpec(BlockMixer):
    """`attention` of each query to the blocks of tokens that it chooses: each KV head by an indexer's scores, or with
    `indexer` None each head by the products of its query with the means of a block's keys (MoBA, arXiv:2502.13189).

    `mean_span`: such means are kept of so many tokens, a divisor of the blocks' size; 0 = there is an indexer.
    """

    choice: BlockChoice
    indexer: BlockIndexerSpec | None = None
    mean_span: int = 0

    def tensors(self) -> Iterator[TensorSpec]:
        yield from self.attention.tensors()
        if self.indexer is not None:
            yield from self.indexer.tensors()

    def state(self, dtype: str) -> ChosenKVSpec:
        """State kept per token when stored as `dtype`."""
        heads, width = self.attention.num_kv_heads, self.attention.head_dim
        if self.indexer is not None:
            return ChosenKVSpec(heads, width, dtype, index_dim=self.indexer.head_dim)
        return ChosenKVSpec(heads, width, dtype, summaries=(MEANS,), span=self.mean_span)

    @property
    def cost(self) -> MixerCost:
        """Attention to the chosen blocks, and a score of every token or of every mean."""
        attention, plain = self.attention, self.attention.cost
        if self.indexer is not None:
            size: float = self.indexer.head_dim
            flops: float = 2 * attention.num_kv_heads * size
        else:
            size = attention.num_kv_heads * attention.head_dim / self.mean_span
            flops = 2 * attention.num_heads * attention.head_dim / self.mean_span
        return replace(
            plain,
            window=self.choice.num_tokens,
            granule=self.choice.size,
            scanned_size=size,
            scan_flops=flops,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressorSpec:
    """Key or value of `length` consecutive ones of a head: `down(silu(up(x + position)))`, of them side by side."""

    position: TensorSpec  # [length, head_dim]
    up: LinearSpec
    down: LinearSpec

    def tensors(self) -> Iterator[TensorSpec]:
        yield self.position
        yield from self.up.tensors()
        yield from self.down.tensors()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedAttentionSpec(BlockMixer):
    """Native Sparse Attention (arXiv:2502.11089): the sum of three results over the K and V of `attention`, each head's
    times a gate of its own, the sigmoid of what `gates` gives for the token.

    1. attention to compressed keys and values, one of each `length` tokens, that begin `stride` tokens apart and end at
       the query's position or before;
    2. attention to the blocks that `choice` takes. A KV head's score of a block is the sum over the heads that share it
       of the weights that they give to compressed keys in 1., each as often as it has strides in the block. Scores are
       rounded to 65,536ths;
    3. attention to the last `window` tokens.

    Args:
        gates: to 3 x heads numbers, those of the compressed result first.
    """

    choice: BlockChoice
    keys: CompressorSpec
    values: CompressorSpec
    gates: LinearSpec
    length: int
    stride: int
    window: int

    def tensors(self) -> Iterator[TensorSpec]:
        for part in (self.attention, self.keys, self.values, self.gates):
            yield from part.tensors()

    def state(self, dtype: str) -> ChosenKVSpec:
        """State kept per token when stored as `dtype`."""
        names = (COMPRESSED_KEYS, COMPRESSED_VALUES)
        return ChosenKVSpec(
            self.attention.num_kv_heads, self.attention.head_dim, dtype, summaries=names, span=self.stride
        )

    @property
    def cost(self) -> MixerCost:
        """Three passes: chosen blocks, the window, and all that is compressed."""
        plain = self.attention.cost
        passes = (
            replace(plain, window=self.window),
            replace(plain, read_size=plain.read_size / self.stride, pair_flops=plain.pair_flops / self.stride),
        )
        return replace(plain, window=self.choice.num_tokens, granule=self.choice.size, further=passes)
