"""Specs of block-sparse attention: each query attends only to some blocks of tokens, chosen by a score (MoBA,
MiniMax-M3, Native Sparse Attention).

The K and V of all tokens stay in the KV cache. "Block" means a block of the model here, whose size is independent of
the KV cache's block size.
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
    """Rule by which a query chooses blocks of `size` tokens among all up to its own: the `top_k` with the highest
    scores, the earlier one if scores are equal. The first `num_first` and the last `num_last` blocks, the query's own
    included, are always among the chosen.
    """

    size: int  # tokens
    top_k: int  # blocks, those that are always chosen included
    num_first: int = 0
    num_last: int = 1

    @property
    def num_tokens(self) -> int:
        """The most tokens that one query can choose."""
        return self.size * self.top_k


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockIndexerSpec:
    """Block scores of MiniMax-M3: the score of a block is the highest product of an index query with the index keys of
    the block's tokens. Each KV head has its own index query; all share the index keys. Both are normed, and rotated
    like the attention's queries and keys.
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
    """`attention` restricted to the chosen blocks. With an `indexer` each KV head chooses by its scores; without one
    each head chooses by the products of its query with means of a block's keys (MoBA, arXiv:2502.13189).

    Args:
        mean_span: tokens that each stored mean of keys covers, a divisor of the block size; 0 with an indexer.
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
    """Compression of `length` consecutive keys (or values) of a head into one: `down(silu(up(x + position)))`, where
    `x` is the keys concatenated.
    """

    position: TensorSpec  # [length, head_dim]
    up: LinearSpec
    down: LinearSpec

    def tensors(self) -> Iterator[TensorSpec]:
        yield self.position
        yield from self.up.tensors()
        yield from self.down.tensors()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedAttentionSpec(BlockMixer):
    """Native Sparse Attention (arXiv:2502.11089): the sum of three attentions over the K and V of `attention`, each
    multiplied by a gate of its own for each head, the sigmoid of an output of `gates`.

    1. attention to compressed keys and values, each made from `length` tokens; they begin `stride` tokens apart and
       end at or before the query's position;
    2. attention to the blocks chosen by `choice`. A KV head's score of a block is the sum, over the query heads that
       share it, of their weights for compressed keys in 1., each counted as often as it has strides in the block.
       Scores are rounded to 65,536ths;
    3. attention to the last `window` tokens.

    Args:
        choice: rule by which the second attention chooses blocks.
        keys, values: compression of `length` tokens' keys, and of their values, into one of each.
        gates: map to 3 x heads numbers, the gates of the compressed attention first.
        stride: tokens from the beginning of one compressed key to that of the next.
        window: tokens of the third attention, the query's own included.
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
