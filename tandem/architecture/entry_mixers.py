"""Specs of the attention of DeepSeek-V4. A query attends to a window of recent rows and to *entries* in one softmax.

A row belongs to one token and is the key and the value of all heads at once. An entry is a row that is compressed from
`span` consecutive tokens; entries of all earlier tokens are kept.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Self

from tandem.architecture.entry_states import EntriesSpec, EntryInputsSpec, RowsSpec
from tandem.architecture.mixer_base import BareMixer
from tandem.architecture.mixer_cost import MixerCost
from tandem.architecture.rope import RopeSpec
from tandem.architecture.state import StateSpec
from tandem.architecture.tensors import LinearSpec, NormSpec, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRowAttentionSpec(BareMixer):
    """Causal self-attention within a window, over one row per token that serves all heads as key and value.

    A row's last `rope.rotary_dim` elements are rotated, and so are a query's; element 2 i turns with element 2 i + 1.
    Since values are rotated too, the output of each head is rotated back by the query's position.

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
        """State of the rows; None in a mixer that also keeps entries, see `states`."""
        return RowsSpec(self.head_dim, dtype, self.window)

    def with_rope(self, rope: RopeSpec) -> Self:
        """This spec with another rotary embedding."""
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
    """Compression of each `span` tokens into one entry of `size` numbers: the normed, weighted sum of the tokens'
    contents. For each number the weights are the softmax over the tokens of their gates plus `bias`, which depends on
    the token's place in the span.

    With 2 `series` spans overlap. The first half of a token's contents and gates goes into the entry of the next span,
    the second half into that of its own. So an entry is made of 2 x `span` tokens, the first of `span`.

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
        """Contents and gates of the tokens whose entries are not made yet, each a `EntryInputsSpec`."""
        parts = EntryInputsSpec(self.series * self.size, dtype, self.span, self.series)
        return (parts, parts)

    @property
    def cost(self) -> MixerCost:
        """Cost per token of making entries: contents and gates are read once, with five operations a content."""
        size = self.series * self.size
        return MixerCost(2 * size, 5 * size, window=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryIndexerSpec:
    """Scores all entries for a query, which attends to the best `top_k`; ties go to the earlier entry. The score is
    that of an `IndexerSpec`, with keys made by `pool` and queries whose last elements are rotated.
    """

    pool: PoolSpec
    q: LinearSpec
    weights: LinearSpec
    num_heads: int
    top_k: int

    @property
    def head_dim(self) -> int:
        """Number of elements of a key."""
        return self.pool.size

    def tensors(self) -> Iterator[TensorSpec]:
        for part in (self.pool, self.q, self.weights):
            yield from part.tensors()


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryAttentionSpec(SharedRowAttentionSpec):
    """`SharedRowAttentionSpec` whose queries also attend, in the same softmax, to entries of `pool` whose spans end at
    or before their position. `indexer` chooses the entries; None = all of them. An entry is rotated by the position of
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
        """None, since there are several states, see `states`."""
        return None

    def states(self, dtype: str) -> tuple[StateSpec, ...]:
        """States of the rows, of the entries, of the contents and gates of coming entries, and with an indexer those of
        the contents and gates of its keys.
        """
        indexer = self.indexer
        own = (
            RowsSpec(self.head_dim, dtype, self.window),
            EntriesSpec(self.head_dim, dtype, self.pool.span, 0 if indexer is None else indexer.head_dim),
            *self.pool.states(dtype),
        )
        return own if indexer is None else (*own, *indexer.pool.states(dtype))

    @property
    def cost(self) -> MixerCost:
        """Passes over the window, over the entries, and over the contents and gates they are made of."""
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
