"""State that one layer keeps of a request (KV cache or recurrent state): its arrays, how long they are needed, and
where another request can reuse them.

Block manager, KV memory, transports, handshake and planner handle all kinds of state through `StateSpec`. Pure
arithmetic, no tensors.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from tandem.architecture.rectangles import head_range

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Plane:
    """One named array of a layer's state in a block, such as its keys.

    Args:
        shape: shape of one token's part, or of the whole array where `token_axis` is None.
        dtype: stored type of its numbers.
        token_axis: axis inserted into `shape` for the block's tokens; None = the array's size does not depend on
            tokens: it is the state after the last computed token of the block.
        by_head: whether the first axis is heads, which ranks divide; else every rank keeps the whole array.
        span: number of consecutive tokens that have one part together. It lies in the block of the last of them, so
            that it never depends on tokens after the block; a block has room for as many as may end in it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    token_axis: int | None
    by_head: bool = False
    span: int = 1

    @property
    def num_heads(self) -> int:
        """Number of parts into which ranks may divide the array; 1 if each keeps the whole."""
        return self.shape[0] if self.by_head else 1

    @property
    def num_bytes(self) -> int:
        """Bytes for one token or span, or of the whole array where `token_axis` is None."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def block_shape(self, block_size: int) -> tuple[int, ...]:
        """Shape of the array in a block of `block_size` tokens."""
        if self.token_axis is None:
            return self.shape
        return (*self.shape[: self.token_axis], -(-block_size // self.span), *self.shape[self.token_axis :])

    def block_bytes(self, block_size: int) -> int:
        return self.num_bytes if self.token_axis is None else self.num_bytes * -(-block_size // self.span)


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive bytes of a layer's state in a block: `num_heads` heads, which ranks divide, or a single one that each
    rank keeps whole. `is_cut`: its heads may lie in different pages.
    """

    name: str
    num_heads: int
    head_bytes: int
    is_cut: bool = False

    @property
    def num_bytes(self) -> int:
        return self.num_heads * self.head_bytes


class StateSpec(ABC):
    """State of one layer, as a hashable value: states with equal specs are stored in the same way.

    A block covers `block_size` tokens. Of each block that a request still needs, or that may be reused, the layer keeps
    its planes; those whose size does not depend on tokens hold the state after the block's last computed token. Here
    `is_bounded`, `needed` and `publishable` describe ordinary KV: it grows with every token, all later queries see it,
    and later tokens do not change it. Specs of other states override them.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def planes(self) -> tuple[Plane, ...]:
        """The arrays in the order in which they lie in a block."""

    @property
    def is_bounded(self) -> bool:
        """Whether the state of a request stops growing at some length, as with a window."""
        return False

    def needed(self, position: int) -> int:
        """The first position whose state the query at `position` still reads, with all after it. Never decreases."""
        return 0

    def publishable(self, first: int, end: int, block_size: int) -> range:
        """Indices, of the blocks `first` to `end - 1`, that are always stored for reuse, since a later request can
        continue from them. Others are stored where a request's computation stops or where a request asks for it.
        """
        return range(first, end)

    def segments(self, block_size: int) -> "tuple[Segment, ...]":
        """Segments of the layer's state in a block of `block_size` tokens, in order."""
        return tuple(
            Segment(plane.name, plane.num_heads, plane.block_bytes(block_size) // plane.num_heads)
            for plane in self.planes
        )

    def shard(self, num_ranks: int) -> "StateSpec":
        """The part of the state that each of `num_ranks` ranks stores: all of it, unless its planes have heads."""
        return self

    @property
    def is_divided(self) -> bool:
        """Whether ranks keep parts of the state; else each keeps all of it."""
        return any(plane.by_head for plane in self.planes)

    @property
    def can_rewind(self) -> bool:
        """Whether the state kept for some tokens also serves a request with fewer of them: not if a plane holds only
        the state after the last token.
        """
        return all(plane.token_axis is not None for plane in self.planes)

    @property
    def is_constant(self) -> bool:
        """Whether no plane grows with tokens. A block then holds a whole state, and may have several pages."""
        return all(plane.token_axis is None for plane in self.planes)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that each token adds, as long as none has left the window; its share of a span's bytes, rounded up."""
        return sum(-(-plane.num_bytes // plane.span) for plane in self.planes if plane.token_axis is not None)

    @property
    def bytes_per_request(self) -> int:
        """Bytes per request that do not depend on its length."""
        return sum(plane.num_bytes for plane in self.planes if plane.token_axis is None)

    def bytes(self, num_tokens: int) -> int:
        """Bytes for a request of `num_tokens` tokens, without what is kept of it for reuse by others."""
        num_seen = num_tokens - self.needed(num_tokens - 1) if num_tokens else 0
        return num_seen * self.bytes_per_token + (self.bytes_per_request if num_tokens else 0)

    def block_bytes(self, block_size: int) -> int:
        """Bytes of the layer's state in a block of `block_size` tokens."""
        return sum(plane.block_bytes(block_size) for plane in self.planes)

    def most_seen(self, num_tokens: int) -> int:
        """The most earlier tokens, of at most `num_tokens`, whose state a query reads."""
        return num_tokens - self.needed(num_tokens)

    def most_blocks(self, num_tokens: int, max_chunk_tokens: int, block_size: int) -> int:
        """The most blocks that a request holds at once while it grows to `num_tokens` in chunks of at most
        `max_chunk_tokens`: those that a chunk's first query reads, and those of the chunk that are publishable or last.
        """
        num_seen = self.most_seen(num_tokens)
        num_publishable = len(self.publishable(0, math.ceil(max_chunk_tokens / block_size) + 1, block_size))
        return min(
            math.ceil(num_tokens / block_size),
            math.ceil((num_seen + max_chunk_tokens) / block_size) + 1,
            math.ceil((num_seen - 1) / block_size) + 1 + num_publishable + 1,
        )

    def __str__(self) -> str:
        """Names everything that must be equal for two workers' blocks to mean the same."""
        return ", ".join(
            f"{plane.name} {' x '.join(map(str, plane.shape))} {plane.dtype}"
            + (" once" if plane.token_axis is None else f" by token at axis {plane.token_axis}")
            for plane in self.planes
        )


@dataclass(frozen=True, slots=True)
class KVSpec(StateSpec):
    """K and V that one attention layer keeps per token: `num_kv_heads` heads of `head_dim`.

    `window` is the number of positions a query sees, itself included; None = all of them.
    """

    num_kv_heads: int
    head_dim: int
    dtype: str
    window: int | None = None

    @property
    def planes(self) -> tuple[Plane, ...]:
        shape = (self.num_kv_heads, self.head_dim)
        return tuple(Plane(name, shape, self.dtype, token_axis=1, by_head=True) for name in ("k", "v"))

    def shard(self, num_ranks: int) -> "KVSpec":
        """Equal parts of the heads; with fewer heads than ranks, one head each."""
        return replace(self, num_kv_heads=len(head_range(self.num_kv_heads, 0, num_ranks)))

    @property
    def is_bounded(self) -> bool:
        return self.window is not None

    def needed(self, position: int) -> int:
        """The start of the window."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def __str__(self) -> str:
        window = "" if self.window is None else f" window {self.window}"
        return f"{self.num_kv_heads} heads x {self.head_dim} {self.dtype}{window}"


@dataclass(frozen=True, slots=True)
class LatentSpec(StateSpec):
    """Latents of a layer with multi-head latent attention: per token one row of `rank` numbers, the normed latent from
    which the keys and values of all heads are made, followed by the `rotary_dim` elements of a rotated key that all
    heads share (DeepSeek-V2, arXiv:2405.04434). Rotated elements are half-split, whatever their order in a checkpoint.
    """

    rank: int
    rotary_dim: int
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements of one row."""
        return self.rank + self.rotary_dim

    @property
    def planes(self) -> tuple[Plane, ...]:
        return (Plane("latent", (self.size,), self.dtype, token_axis=0),)

    def __str__(self) -> str:
        return f"latent {self.rank} + rotated key {self.rotary_dim} {self.dtype}"


@dataclass(frozen=True, slots=True)
class IndexedLatentSpec(LatentSpec):
    """Latents with an index: a query reads only the rows that it chooses, by the key of `index_dim` numbers stored
    beside each row (DeepSeek-V3.2, arXiv:2512.02556). `index_dim` 0: an earlier layer chooses, and has the keys.
    """

    index_dim: int

    @property
    def planes(self) -> tuple[Plane, ...]:
        row = Plane("latent", (self.size,), self.dtype, token_axis=0)
        return (row, Plane("index", (self.index_dim,), self.dtype, token_axis=0)) if self.index_dim else (row,)

    def __str__(self) -> str:
        keys = f"index key {self.index_dim}" if self.index_dim else "chosen by another layer's index keys"
        return f"latent {self.rank} + rotated key {self.rotary_dim} {self.dtype}, {keys}"


@dataclass(frozen=True, slots=True)
class ChosenKVSpec(StateSpec):
    """K and V of block-sparse attention, and the data by which queries choose blocks: an index key of `index_dim`
    numbers per token, or summaries. Each plane in `summaries` has, for each KV head and `span` tokens, a row of
    `head_dim` numbers. 0 and () = none.

    A row of a summary is made when the last of its `span` tokens is computed, and lies in that token's block. So a
    token adds `head_dim / span` numbers to it, and a block needs whole spans.
    """

    num_kv_heads: int
    head_dim: int
    dtype: str
    index_dim: int = 0
    summaries: tuple[str, ...] = ()
    span: int = 1

    @property
    def planes(self) -> tuple[Plane, ...]:
        heads, width = self.num_kv_heads, self.head_dim
        kv = tuple(Plane(name, (heads, width), self.dtype, token_axis=1, by_head=True) for name in ("k", "v"))
        index = (Plane("index", (self.index_dim,), self.dtype, token_axis=0),) if self.index_dim else ()
        rows = (heads, width // self.span)
        summaries = (Plane(name, rows, self.dtype, token_axis=1, by_head=True) for name in self.summaries)
        return (*kv, *index, *summaries)

    def shard(self, num_ranks: int) -> "ChosenKVSpec":
        """Equal parts of the heads; with fewer heads than ranks, one head each. Every rank keeps whole index keys."""
        return replace(self, num_kv_heads=len(head_range(self.num_kv_heads, 0, num_ranks)))

    def __str__(self) -> str:
        index = f", index key {self.index_dim}" if self.index_dim else ""
        summaries = "".join(f", {name} of each {self.span} tokens" for name in self.summaries)
        return f"{self.num_kv_heads} heads x {self.head_dim} {self.dtype}, of chosen blocks{index}{summaries}"


@dataclass(frozen=True, slots=True)
class RecurrentSpec(StateSpec):
    """A recurrent state, which every token changes and which does not grow: float32 matrices of shape `heads`, and the
    inputs of a convolution at the last `columns` tokens, oldest first. A later request can continue from it only at
    tokens after which a copy was kept.

    Args:
        channels: of the convolution.
        heads: (number of heads, rows, columns of a head's matrix); () = there is no such matrix.
        parts: (number of heads, or of parts without any, channels of each) of which the channels consist; () = ranks do
            not divide them.
    """

    channels: int
    columns: int
    dtype: str
    heads: tuple[int, ...] = ()
    parts: tuple[tuple[int, int], ...] = ()

    @property
    def planes(self) -> tuple[Plane, ...]:
        """The matrices first, so that their float32 numbers are aligned."""
        matrices = (self._matrices,) if self.heads else ()
        return (*matrices, Plane("columns", (self.columns, self.channels), self.dtype, token_axis=None))

    @property
    def is_divided(self) -> bool:
        """Whether ranks divide the channels: if it has `parts`."""
        return bool(self.parts)

    @property
    def _matrices(self) -> Plane:
        return Plane("matrices", self.heads, "float32", token_axis=None, by_head=bool(self.parts))

    def segments(self, block_size: int) -> tuple[Segment, ...]:
        """The matrices by head, if ranks divide them; then the convolution's inputs, token by token. Each of these
        consists of all `parts`, and each part of its heads.
        """
        matrices, columns = self._matrices, self.planes[-1]
        if not self.parts:
            whole = Segment(columns.name, 1, columns.num_bytes)
            return (Segment(matrices.name, 1, matrices.num_bytes, is_cut=True), whole) if self.heads else (whole,)
        by_part = (
            Segment(f"column {column} part {part}", num_heads, size * DTYPE_BYTES[self.dtype])
            for column in range(self.columns)
            for part, (num_heads, size) in enumerate(self.parts)
        )
        if not self.heads:
            return tuple(by_part)
        by_head = Segment(matrices.name, matrices.num_heads, matrices.num_bytes // matrices.num_heads, is_cut=True)
        return by_head, *by_part

    def shard(self, num_ranks: int) -> "RecurrentSpec":
        """Equal parts of the heads; with fewer heads in a part than ranks, one head each."""
        if not self.parts:
            return self
        parts = tuple((len(head_range(num_heads, 0, num_ranks)), size) for num_heads, size in self.parts)
        heads = (len(head_range(self.heads[0], 0, num_ranks)), *self.heads[1:]) if self.heads else ()
        channels = sum(num_heads * size for num_heads, size in parts)
        return replace(self, channels=channels, heads=heads, parts=parts)

    @property
    def is_bounded(self) -> bool:
        return True

    def needed(self, position: int) -> int:
        """The position before: only the state after the previous token is read."""
        return max(0, position - 1)

    def publishable(self, first: int, end: int, block_size: int) -> range:
        """No blocks: where a state is kept depends on the request (`tandem.kvcache.checkpoints`)."""
        return range(first, first)

    def __str__(self) -> str:
        matrices = f"{' x '.join(map(str, self.heads))} float32 (head, row, column) and " if self.heads else ""
        return f"recurrent {matrices}{self.columns} columns of {self.channels} {self.dtype}, oldest first"
