"""Token mixers whose queries attend to a window of rows, one a token, each key and value at once, and to *entries*:
rows that stand for `span` tokens each, compressed from them (DeepSeek-V4).
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Self

from tandem.architecture.entry_states import EntriesSpec, PartsSpec, RowsSpec
from tandem.architecture.mixer_base import BareMixer
from tandem.architecture.mixer_cost import MixerCost
from tandem.architecture.rope import RopeSpec
from tandem.architecture.state import StateSpec
from tandem.architecture.tensors import LinearSpec, NormSpec, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRowAttentionSpec(BareMixer):
    """Causal self-attention of a window to one row a token, which is key and value of all heads.

    A row's last `rope.rotary_dim` elements are rotated, and so are a query's; element 2 i turns with element 2 i + 1.
    Since values are rotated too, what a head finds is turned back by the query's position.

    Args:
        q_a, q_norm: from the hidden state to a latent, of which `q` makes queries, which `head_norm` norms.
        kv, kv_norm: from the hidden state to a row.
        o_groups: for each group of heads a linear map of its heads' outputs, concatenated.
        o: linear map of the groups' results, concatenated.
        sinks: as in an `AttentionSpec`.
    """

    q_a: LinearSpec
    q_norm: NormSpec
    q: LinearSpec
    head_norm: NormSpec
    kv: LinearSpec
    kv_norm: NormSpec
    o_groups: tuple[LinearSpec, ...]
    o: LinearSpec
    num_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec
    window: int
    sinks: TensorSpec

    def tensors(self) -> Iterator[TensorSpec]:
        for linear in (self.q_a, self.q, self.kv, *self.o_groups, self.o):
            yield from linear.tensors()
        for norm in (self.q_norm, self.head_norm, self.kv_norm):
            yield from norm.tensors()
        yield self.sinks

    def state(self, dtype: str) -> StateSpec | None:
        """State of the rows; a mixer that keeps entries too has further states."""
        return RowsSpec(self.head_dim, dtype, self.window)

    def with_rope(self, rope: RopeSpec) -> Self:
        """The same with another rotary embedding."""
        return replace(self, rope=rope)

    @property
    def window_cost(self) -> MixerCost:
        """Cost of attention to the window: a row is read once, as key and as value."""
        return MixerCost(self.head_dim, 4 * self.num_heads * self.head_dim, self.window)

    @property
    def cost(self) -> MixerCost:
        return self.window_cost


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """Compression of each `span` tokens into one entry of `size` numbers: the normed sum of the tokens' contents, each
    times a weight. For each number the weights are the softmax over the tokens of its gates plus `bias`, which depends
    on the token's place in the span.

    With two `series` spans overlap. The first half of a token's contents and gates goes into the entry of the next
    span, the second half into that of its own. So an entry is made of 2 x `span` tokens, the first of `span`.

    Args:
        contents, gates: linear maps of the hidden state to `series` x `size` numbers each, the values and the logits of
            their weights.
        bias: [span, series x size].
    """

    contents: LinearSpec
    gates: LinearSpec
    bias: TensorSpec
    norm: NormSpec
    size: int
    span: int
    series: int

    def tensors(self) -> Iterator[TensorSpec]:
        for part in (self.contents, self.gates, self.norm):
            yield from part.tensors()
        yield self.bias

    def states(self, dtype: str) -> tuple[StateSpec, ...]:
        """Contents and gates of the tokens whose entries are still to be made, each a `PartsSpec`."""
        parts = PartsSpec(self.series * self.size, dtype, self.span, self.series)
        return (parts, parts)

    @property
    def cost(self) -> MixerCost:
        """Cost of a token's share of its entries: its contents and gates are read once, with five operations for each
        content.
        """
        size = self.series * self.size
        return MixerCost(2 * size, 5 * size, window=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryIndexerSpec:
    """Scorer of all entries for a query, whose best `top_k` are attended to; ties go to the earlier entry. Scores are
    those of an `IndexerSpec`, with keys that `pool` makes and queries whose last elements are rotated.
    """

    pool: PoolSpec
    q: LinearSpec
    weights: LinearSpec
    num_heads: int
    top_k: int

    @property
    def head_dim(self) -> int:
        """Numbers of a key."""
        return self.pool.size

    def tensors(self) -> Iterator[TensorSpec]:
        for part in (self.pool, self.q, self.weights):
            yield from part.tensors()


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryAttentionSpec(SharedRowAttentionSpec):
    """`SharedRowAttentionSpec` that also attends, in the same softmax, to entries of `pool` whose spans end at the
    query's position or before: to those that `indexer` chooses, None = to all. An entry is rotated by the position of
    its span's first token.
    """

    pool: PoolSpec
    indexer: EntryIndexerSpec | None

    @classmethod
    def of(
        cls, attention: SharedRowAttentionSpec, *, pool: PoolSpec, indexer: EntryIndexerSpec | None
    ) -> "EntryAttentionSpec":
        """Returns `attention`, extended to attend to entries."""
        parts = {field.name: getattr(attention, field.name) for field in fields(attention)}
        return cls(**parts, pool=pool, indexer=indexer)

    def tensors(self) -> Iterator[TensorSpec]:
        yield from SharedRowAttentionSpec.tensors(self)
        yield from self.pool.tensors()
        if self.indexer is not None:
            yield from self.indexer.tensors()

    def state(self, dtype: str) -> StateSpec | None:
        """None: it keeps several."""
        return None

    def states(self, dtype: str) -> tuple[StateSpec, ...]:
        """Rows, then entries, then contents and gates of entries, then with an indexer those of its keys."""
        indexer = self.indexer
        own = (
            RowsSpec(self.head_dim, dtype, self.window),
            EntriesSpec(self.head_dim, dtype, self.pool.span, 0 if indexer is None else indexer.head_dim),
            *self.pool.states(dtype),
        )
        return own if indexer is None else (*own, *indexer.pool.states(dtype))

    @property
    def cost(self) -> MixerCost:
        """Passes over the window, over entries, and over what they are made of."""
        plain, span, indexer = self.window_cost, self.pool.span, self.indexer
        pools = (self.pool,) if indexer is None else (self.pool, indexer.pool)
        of_entries = replace(plain, read_size=plain.read_size / span, pair_flops=plain.pair_flops / span, window=None)
        if indexer is not None:
            of_entries = replace(
                of_entries,
                window=indexer.top_k * span,
                scanned_size=indexer.head_dim / span,
                scan_flops=2 * indexer.num_heads * indexer.head_dim / span,
            )
        return replace(plain, further=(of_entries, *(pool.cost for pool in pools)))
