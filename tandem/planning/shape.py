"""A model as planning sees it: how many numbers it holds, multiplies and keeps per token. Plain arithmetic, no tensors.

Only dense and mixture-of-experts transformers with K and V per head (MHA, GQA, MQA), windowed layers included.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """One decoder-only transformer. Counts are of parameters, widths of elements.

    Args:
        windows: of each layer, how many positions a query sees; None = all of them.
        num_layer_parameters: of all layers without their routed experts; every token is multiplied by them.
        num_table_parameters: of the embedding table; the head has as many, and is the same one when `tied`.
        num_expert_parameters: of one routed expert in one layer; 0 = no experts.
        num_expert_layers: layers that have them.
        weight_bits, kv_bits: what one number takes at rest.
    """

    name: str
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    num_layer_parameters: int
    num_table_parameters: int
    tied: bool
    max_tokens: int
    num_expert_parameters: int = 0
    num_expert_layers: int = 0
    num_experts: int = 0
    num_experts_per_token: int = 0
    weight_bits: int = 16
    kv_bits: int = 16

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def num_parameters(self) -> int:
        """All that the model holds."""
        tables = self.num_table_parameters * (1 if self.tied else 2)
        return self.num_layer_parameters + tables + self._experts(self.num_experts)

    @property
    def num_multiplied_parameters(self) -> int:
        """Those that one token of a prompt is multiplied by. The head is not: a prompt needs it once."""
        return self.num_layer_parameters + self._experts(self.num_experts_per_token)

    @property
    def num_active_parameters(self) -> int:
        """Those that one generated token is multiplied by: the head too."""
        return self.num_multiplied_parameters + self.num_table_parameters

    @property
    def weight_bytes(self) -> float:
        return self.num_parameters * self.weight_bits / 8

    def swept_weight_bytes(self, num_running: float) -> float:
        """Weights that one decode step of so many requests reads: all of them, but of the experts only those that some
        request chose (choices taken as independent and even).

        NOTE: the input table is counted though a step reads a few of its rows: published figures count all weights.
        """
        chosen = 1.0
        if self.num_experts:
            chosen = 1 - (1 - self.num_experts_per_token / self.num_experts) ** num_running
        return self.weight_bytes - self._experts(self.num_experts) * self.weight_bits / 8 * (1 - chosen)

    @property
    def kv_layer_bytes(self) -> float:
        """K and V of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.kv_bits / 8

    @property
    def kv_bytes_per_token(self) -> float:
        """K and V of one token in every layer, as long as all windows reach it."""
        return self.kv_layer_bytes * self.num_layers

    def kv_bytes(self, num_tokens: float) -> float:
        """What a context of so many tokens keeps and a decode step reads: a windowed layer no more than its window."""
        kept = (count * (num_tokens if w is None else min(w, num_tokens)) for w, count in self._window_counts())
        return self.kv_layer_bytes * sum(kept)

    @property
    def num_full_layers(self) -> int:
        return self.windows.count(None)

    def attention_flops(self, num_tokens: float, num_cached_tokens: float = 0) -> float:
        """Of computing a prompt whose first tokens are cached: two products of two operations for each query, key and
        layer, causal (a query sees itself and what is before it, within the window).
        """
        counts = self._window_counts()
        pairs = sum(count * _num_pairs(num_tokens, num_cached_tokens, window) for window, count in counts)
        return 4.0 * self.num_heads * self.head_dim * pairs

    def _window_counts(self) -> list[tuple[int | None, int]]:
        """Each different window, and how many layers have it."""
        return [(window, self.windows.count(window)) for window in set(self.windows)]

    def _experts(self, num_of_each_layer: int) -> int:
        return self.num_expert_parameters * self.num_expert_layers * num_of_each_layer


def _num_pairs(num_tokens: float, num_cached_tokens: float, window: int | None) -> float:
    """Query-key pairs of one layer; as `PrefillWork` counts them where there is no window."""
    return _triangle(num_tokens, window) - _triangle(num_cached_tokens, window)


def _triangle(num_tokens: float, window: int | None) -> float:
    if window is None or num_tokens <= window:
        return num_tokens * num_tokens / 2
    return window * window / 2 + (num_tokens - window) * window
