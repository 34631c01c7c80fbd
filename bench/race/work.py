"""The least a workload can cost: its arithmetic over the measured matmul rate, its reads over the measured bandwidth.

A floor is below what any system can reach, since it lets arithmetic and reads overlap without loss and every prefix be
found. Counts bfloat16 (two bytes), matrix products and attention only. Of a prompt only the last token's hidden state
is asked for, so the last layer need not compute more than K and V of the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_BYTES = 2


@dataclass(frozen=True, slots=True)
class Span:
    """Positions `start` up to `end` of one request are computed, with everything before them as context."""

    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def pairs(self) -> float:
        """Of a query and a key it may see."""
        return (self.end**2 - self.start**2) / 2


@dataclass(frozen=True, slots=True)
class Work:
    """Prompts and answers. `num_steps`: how often at least the weights are read to write the answers."""

    prefills: tuple[Span, ...]
    decodes: tuple[Span, ...]
    num_steps: int


@dataclass(frozen=True, slots=True)
class Rates:
    """Of this machine in this minute. Bytes and FLOP per second."""

    read_bandwidth: float
    matmul: float


class ModelCost:
    """Cost of one token of a dense Qwen3, or of a Qwen3-MoE. `sizes`: its config.json; embeddings are tied.

    NOTE: a step of several tokens is counted as if all of them chose the same experts, which is the least.
    """

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        self._layers, hidden = int(sizes["num_hidden_layers"]), int(sizes["hidden_size"])
        heads, kv_heads = int(sizes["num_attention_heads"]), int(sizes["num_key_value_heads"])
        head_dim = int(sizes["head_dim"])
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        num_experts = int(sizes.get("num_experts", sizes.get("num_local_experts", 0)))
        router = hidden * num_experts
        width = int(sizes["moe_intermediate_size"] if num_experts else sizes["intermediate_size"])
        num_read = int(sizes["num_experts_per_tok"]) if num_experts else 1
        layer = attention + router + 3 * hidden * width * num_read
        self._layer_weights = self._layers * layer
        self._unread_weights = self._layers * 3 * hidden * width * (num_experts - num_read if num_experts else 0)
        self._unasked_weights = layer - 2 * hidden * kv_heads * head_dim
        self._head_weights = int(sizes["vocab_size"]) * hidden
        self._query_width = heads * head_dim
        self._kv_bytes = _BYTES * self._layers * 2 * kv_heads * head_dim

    @property
    def weight_bytes(self) -> int:
        """As held in memory once, embeddings tied."""
        return self._step_bytes + _BYTES * self._unread_weights

    @property
    def _step_bytes(self) -> int:
        """Weights that a step reads at least."""
        return _BYTES * (self._layer_weights + self._head_weights)

    def floor_s(self, work: Work, rates: Rates) -> float:
        """Of all of it."""
        return max(self.flops(work) / rates.matmul, self.read_bytes(work) / rates.read_bandwidth)

    def prefill_floor_s(self, work: Work, rates: Rates) -> float:
        """Of the prompts alone, up to their first tokens."""
        flops = self._prefill_flops(work.prefills) + 2 * self._head_weights * len(work.prefills)
        return flops / rates.matmul

    def decode_floor_s(self, work: Work, rates: Rates) -> float:
        """Of one decoding step, on average."""
        return self.read_bytes(work) / rates.read_bandwidth / work.num_steps

    def flops(self, work: Work) -> float:
        """NOTE: one row of logits for each prompt and each token of an answer but its first."""
        rows = len(work.prefills) + sum(span.length for span in work.decodes)
        return self._prefill_flops(work.prefills) + self._span_flops(work.decodes) + 2 * self._head_weights * rows

    def read_bytes(self, work: Work) -> float:
        """To write the answers: the weights once a step, and each request's own context once a token."""
        context = sum(span.pairs for span in work.decodes)
        return work.num_steps * self._step_bytes + self._kv_bytes * context

    def _prefill_flops(self, spans: tuple[Span, ...]) -> float:
        unasked = tuple(Span(span.start, span.end - 1) for span in spans)
        linear = 2 * self._unasked_weights * sum(span.length for span in unasked)
        return self._span_flops(spans) - linear - 4 * self._query_width * sum(span.pairs for span in unasked)

    def _span_flops(self, spans: tuple[Span, ...]) -> float:
        linear = 2 * self._layer_weights * sum(span.length for span in spans)
        return linear + 4 * self._layers * self._query_width * sum(span.pairs for span in spans)
