"""States of layers that keep a row a token for a while, and for good one entry of several tokens (DeepSeek-V4)."""

from dataclasses import dataclass

from tandem.architecture.state import DTYPE_BYTES, Plane, StateSpec


@dataclass(frozen=True, slots=True)
class RowsSpec(StateSpec):
    """A row of `size` numbers for each token, key and value at once. `window`: rows that a query sees, its own too."""

    size: int
    dtype: str
    window: int

    @property
    def planes(self) -> tuple[Plane, ...]:
        return (Plane("rows", (self.size,), self.dtype, token_axis=0),)

    @property
    def is_bounded(self) -> bool:
        return True

    def needed(self, position: int) -> int:
        """The start of the window."""
        return max(0, position - self.window + 1)

    def __str__(self) -> str:
        return f"rows of {self.size} {self.dtype}, window {self.window}"


@dataclass(frozen=True, slots=True)
class PartsSpec(StateSpec):
    """Parts from which entries of `span` tokens are computed: `size` numbers of each token, which are read until the
    entry of its span, or with `num_spans` above 1 that of a later one, is made.
    """

    size: int
    dtype: str
    span: int
    num_spans: int

    @property
    def planes(self) -> tuple[Plane, ...]:
        return (Plane("parts", (self.size,), self.dtype, token_axis=0),)

    @property
    def is_bounded(self) -> bool:
        return True

    def needed(self, position: int) -> int:
        """The first token of the entry that is made next."""
        return max(0, (position // self.span + 1 - self.num_spans) * self.span)

    def most_seen(self, num_tokens: int) -> int:
        """Most where a query is the last of its span."""
        return min(num_tokens, self.num_spans * self.span - 1)

    def __str__(self) -> str:
        spans = "the last span" if self.num_spans == 1 else f"the last {self.num_spans} spans"
        return f"parts of {self.size} {self.dtype}, {spans} of {self.span} tokens"


@dataclass(frozen=True, slots=True)
class EntriesSpec(StateSpec):
    """An entry of `size` numbers for each `span` tokens, and with an index a key of `index_dim` numbers that it is
    chosen by. Both are made when the last of these tokens is computed.
    """

    size: int
    dtype: str
    span: int
    index_dim: int = 0

    @property
    def planes(self) -> tuple[Plane, ...]:
        sizes = {"entries": self.size} | ({"index": self.index_dim} if self.index_dim else {})
        return tuple(Plane(name, (size,), self.dtype, token_axis=0, span=self.span) for name, size in sizes.items())

    def bytes(self, num_tokens: int) -> int:
        """Of whole spans."""
        return num_tokens // self.span * (self.size + self.index_dim) * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        index = f", index key {self.index_dim}" if self.index_dim else ""
        return f"entries of {self.size} {self.dtype} of each {self.span} tokens{index}"
