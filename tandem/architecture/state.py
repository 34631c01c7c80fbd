"""State that a layer keeps per token of a request. Pure arithmetic, no tensors."""

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KVSpec:
    """K and V that one attention layer keeps per token: `num_kv_heads` heads of `head_dim`.

    `window` is the number of positions a query sees, itself included; None = all of them.
    """

    num_kv_heads: int
    head_dim: int
    dtype: str
    window: int | None = None

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    def first_visible(self, position: int) -> int:
        """The first key position that the query at `position` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)
