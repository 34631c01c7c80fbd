"""Cost of a token mixer for one token: elements of state it reads and arithmetic operations it takes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MixerCost:
    """Cost of one pass of a mixer over its state, as functions of the context's length.

    Args:
        read_size: elements of state read for each token that a query attends to.
        pair_flops: operations for each pair of query and key.
        window: the most tokens that a query attends to, because of a window or a choice; None = all.
        token_bytes, token_flops: bytes of state read and written, and operations, for each token whatever the context:
            those of a recurrent state.
        scanned_size, scan_flops: elements read of each token of the context, and operations on them, to choose the
            tokens to attend to.
        granule: tokens are chosen in blocks of this size, of which the last is the query's own, up to the query.
        further: costs of other passes over the same state. The other fields and the methods are about the first pass.
    """

    read_size: float
    pair_flops: float
    window: int | None
    token_bytes: int = 0
    token_flops: int = 0
    scanned_size: float = 0
    scan_flops: float = 0
    granule: int = 1
    further: tuple["MixerCost", ...] = ()

    @property
    def passes(self) -> tuple["MixerCost", ...]:
        """All passes: this one, then `further`. The methods are about a single pass."""
        return (self, *self.further)

    def num_visible(self, num_tokens: float) -> float:
        """Tokens of a context of `num_tokens` that its next query attends to."""
        if self.window is None or num_tokens <= self.window:
            return num_tokens
        return self.window - self.granule + (num_tokens - 1) % self.granule + 1

    def num_scanned(self, num_tokens: float) -> float:
        """Tokens of a context of `num_tokens` that its next query scores for its choice: none if it attends to all."""
        return num_tokens if self.window is not None and num_tokens > self.window else 0

    def num_read(self, num_tokens: float) -> float:
        """Elements that the next query of a context of `num_tokens` reads."""
        return self.read_size * self.num_visible(num_tokens) + self.scanned_size * self.num_scanned(num_tokens)

    def query_flops(self, num_tokens: float) -> float:
        """Operations of the next query of a context of `num_tokens`."""
        return self.pair_flops * self.num_visible(num_tokens) + self.scan_flops * self.num_scanned(num_tokens)

    def prompt_flops(self, num_tokens: float, num_cached_tokens: float = 0) -> float:
        """Operations of all pairs of query and key of a prompt whose first `num_cached_tokens` are cached; the pair of
        a token with itself counts half.
        """
        attended = self._triangle(num_tokens) - self._triangle(num_cached_tokens)
        scanned = self._scanned_triangle(num_tokens) - self._scanned_triangle(num_cached_tokens)
        return self.pair_flops * attended + self.scan_flops * scanned

    def _triangle(self, num_tokens: float) -> float:
        if self.window is None or num_tokens <= self.window:
            return num_tokens * num_tokens / 2
        mean = self.window - (self.granule - 1) / 2
        return self.window * self.window / 2 + (num_tokens - self.window) * mean

    def _scanned_triangle(self, num_tokens: float) -> float:
        if self.window is None or num_tokens <= self.window:
            return 0.0
        return (num_tokens * num_tokens - self.window * self.window) / 2
