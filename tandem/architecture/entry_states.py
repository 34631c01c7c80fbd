"""States of the attention of DeepSeek-V4 (`entry_mixers`): a row per token within a window, one compressed entry for
each span of tokens for good, and the inputs of entries that are not complete yet.
"""

from dataclasses import dataclass

from tandem.architecture.state import DTYPE_BYTES, Plane, StateSpec


@dataclass(frozen=True, slots=True)
class RowsSpec(StateSpec):
    """One row of `size` numbers per token, key and value at once. `window`: tokens a query sees, itself included."""

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
class EntryInputsSpec(StateSpec):
    """Inputs ("parts") from which entries of `span` tokens are computed: `size` numbers per token. An entry is made of
    the parts of the last `num_spans` spans, up to its own; a part is kept until the last entry that needs it is made.
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
        """The first token of those that the next entry is made of."""
        return max(0, (position // self.span + 1 - self.num_spans) * self.span)

    def most_seen(self, num_tokens: int) -> int:
        """The most tokens before a query, reached when the query is the last of its span."""
        return min(num_tokens, self.num_spans * self.span - 1)

    def __str__(self) -> str:
        spans = "the last span" if self.num_spans == 1 else f"the last {self.num_spans} spans"
        return f"parts of {self.size} {self.dtype}, {spans} of {self.span} tokens"


@dataclass(frozen=True, slots=True)
class EntriesSpec(StateSpec):
    """One entry of `size` numbers for each `span` tokens, and with `index_dim` > 0 an index key of as many numbers by
    which queries choose the entry. Both are made when the last token of the span is computed.
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
        """Bytes of the entries of all whole spans in `num_tokens`."""
        return num_tokens // self.span * (self.size + self.index_dim) * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        index = f", index key {self.index_dim}" if self.index_dim else ""
        return f"entries of {self.size} {self.dtype} of each {self.span} tokens{index}"
