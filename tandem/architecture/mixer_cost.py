"""Cost of a token mixer for one token: what it reads of the state and the operations it takes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MixerCost:
    """Elements of state read for each token that a query sees; operations for each query and key; the window of a
    query, None = all.

    `token_bytes`, `token_flops`: what each token reads and computes whatever the context: a recurrent state.
    """

    read_size: int
    pair_flops: int
    window: int | None
    token_bytes: int = 0
    token_flops: int = 0

    def num_visible(self, num_tokens: float) -> float:
        """Tokens of a context of `num_tokens` that its next query reads."""
        return num_tokens if self.window is None else min(self.window, num_tokens)

    def num_pairs(self, num_tokens: float, num_cached_tokens: float = 0) -> float:
        """Query-key pairs of a prompt whose first tokens are cached; a token counts half of itself."""
        return self._triangle(num_tokens) - self._triangle(num_cached_tokens)

    def _triangle(self, num_tokens: float) -> float:
        if self.window is None or num_tokens <= self.window:
            return num_tokens * num_tokens / 2
        return self.window * self.window / 2 + (num_tokens - self.window) * self.window
