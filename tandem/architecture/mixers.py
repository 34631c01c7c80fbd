"""Specs of token mixers, the part of a layer in which tokens see each other: attention over K and V, attention over
latents, and the base of block-sparse attention.

A mixer spec describes its tensors, the state it keeps (KV cache or recurrent state) and its cost, so that no other code
needs to know its kind. Mixers with a recurrent state are in `recurrent_mixers`; `MixerSpec` is the union of all.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Self

from tandem.architecture.entry_mixers import SharedRowAttentionSpec
from tandem.architecture.mixer_base import BareMixer
from tandem.architecture.mixer_cost import MixerCost
from tandem.architecture.recurrent_mixers import LinearRecurrenceSpec, SelectiveScanSpec, ShortConvSpec
from tandem.architecture.rope import RopeSpec
from tandem.architecture.state import ChosenKVSpec, KVSpec, LatentSpec
from tandem.architecture.tensors import LinearSpec, NormSpec, TensorSpec


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """Growth of queries with their position: times `1 + beta * ln(1 + floor(position / original_length))` (Llama 4)."""

    beta: float
    original_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(BareMixer):
    """Causal self-attention over K and V of `num_kv_heads` heads.

    Args:
        k, v: None for `v` = values are the output of `k`, before norm and rotation. Both are None with
            `reads_state_of`.
        scale: multiplies the scores.
        window: positions that a query sees, itself included; None = all.
        rope: None = positions are not encoded.
        softcap: bound of the scores by `softcap * tanh(score / softcap)`; 0 = none.
        q_norm, k_norm: before the rotation; of `head_dim` elements for each head, or of all heads together.
        v_norm: of each head's `head_dim` elements.
        reads_state_of: index of the earlier layer whose K and V are read; this one keeps none. None = its own.
        sinks: [num_heads], a score for each head that takes part in the softmax and has no value (gpt-oss).
        is_gated: `q` gives, after each head's query, as many elements whose sigmoid multiplies the head's output.
    """

    q: LinearSpec
    k: LinearSpec | None
    v: LinearSpec | None
    o: LinearSpec
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None
    window: int | None = None
    softcap: float = 0.0
    q_norm: NormSpec | None = None
    k_norm: NormSpec | None = None
    v_norm: NormSpec | None = None
    reads_state_of: int | None = None
    sinks: TensorSpec | None = None
    query_scaling: QueryScaling | None = None
    is_gated: bool = field(default=False, repr=False)  # NOTE: not in fingerprints, where the size of `q` shows it

    def tensors(self) -> Iterator[TensorSpec]:
        for linear in filter(None, (self.q, self.k, self.v, self.o)):
            yield from linear.tensors()
        for norm in filter(None, (self.q_norm, self.k_norm, self.v_norm)):
            yield from norm.tensors()
        if self.sinks is not None:
            yield self.sinks

    def state(self, dtype: str) -> KVSpec | None:
        """State kept per token when stored as `dtype`; None = it keeps none."""
        if self.reads_state_of is not None:
            return None
        return KVSpec(self.num_kv_heads, self.head_dim, dtype, window=self.window)

    def with_rope(self, rope: RopeSpec) -> "AttentionSpec":
        """This spec with another rotary embedding."""
        return replace(self, rope=rope)

    def limited(self, length: int) -> "AttentionSpec":
        """This spec for sequences of at most `length` tokens: a window that covers them all is dropped."""
        return replace(self, window=None) if self.window is not None and self.window >= length else self

    @property
    def cost(self) -> MixerCost:
        """Two products, each of two operations for every element of every head, query and key."""
        read_size = 2 * self.num_kv_heads * self.head_dim
        return MixerCost(read_size, 4 * self.num_heads * self.head_dim, self.window)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionSpec(BareMixer):
    """Causal self-attention over latents, from which each head's keys and values are made (DeepSeek-V2,
    arXiv:2405.04434).

    `plain_dim` elements of each head's query and key are not rotated and `rotary_dim` are; all heads share the rotated
    key. Keys and values are never made: a head's map to keys is applied to its queries instead, and that to values to
    its sum of latents, so that each layer keeps `rank + rotary_dim` numbers a token.

    Args:
        q_a, q_norm: from the hidden state to the input of `q`; None = `q` takes the hidden state.
        q: map to `num_heads` queries of `plain_dim + rotary_dim` elements.
        kv_a: map from the hidden state to the latent and the rotated key.
        kv_norm: norm of the latent.
        kv_b: from the latent to `plain_dim` elements of a key and `value_dim` of a value, head by head.
        scale: multiplies the scores.
        rope: None = positions are not encoded.
        is_interleaved: rotated elements 2 i and 2 i + 1 are one pair, not i and i + rotary_dim / 2.
    """

    q_a: LinearSpec | None
    q_norm: NormSpec | None
    q: LinearSpec
    kv_a: LinearSpec
    kv_norm: NormSpec
    kv_b: LinearSpec
    o: LinearSpec
    num_heads: int
    rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int
    scale: float
    rope: RopeSpec | None
    is_interleaved: bool
    query_scaling: QueryScaling | None = None

    def tensors(self) -> Iterator[TensorSpec]:
        for linear in filter(None, (self.q_a, self.q, self.kv_a, self.kv_b, self.o)):
            yield from linear.tensors()
        for norm in filter(None, (self.q_norm, self.kv_norm)):
            yield from norm.tensors()

    def state(self, dtype: str) -> LatentSpec:
        """State kept per token when stored as `dtype`."""
        return LatentSpec(self.rank, self.rotary_dim, dtype)

    def with_rope(self, rope: RopeSpec) -> Self:
        """This spec with another rotary embedding."""
        return replace(self, rope=rope)

    @property
    def cost(self) -> MixerCost:
        """Attention over latents, without making keys and values. A score takes two operations for each number of a row
        and head, a sum two for each number of the latent.
        """
        size = self.rank + self.rotary_dim
        return MixerCost(size, 2 * self.num_heads * (size + self.rank), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMixer(BareMixer, ABC):
    """Base of block-sparse attention (`block_mixers`): each query attends to chosen blocks of the K and V of
    `attention`, which has no window, gates, sinks or softcap.
    """

    attention: AttentionSpec

    @abstractmethod
    def tensors(self) -> Iterator[TensorSpec]: ...

    @abstractmethod
    def state(self, dtype: str) -> ChosenKVSpec:
        """State kept per token when stored as `dtype`."""

    @property
    @abstractmethod
    def cost(self) -> MixerCost: ...

    def with_rope(self, rope: RopeSpec) -> Self:
        """This spec with another rotary embedding."""
        return replace(self, attention=self.attention.with_rope(rope))

    @property
    def rope(self) -> RopeSpec | None:
        """Rotary embedding of queries and keys; None = positions are not encoded."""
        return self.attention.rope


MixerSpec = (
    AttentionSpec
    | LatentAttentionSpec
    | BlockMixer
    | SharedRowAttentionSpec
    | ShortConvSpec
    | LinearRecurrenceSpec
    | SelectiveScanSpec
)
