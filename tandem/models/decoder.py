"""The decoder-only transformer that every family is: driven by a `ModelSpec`, over `Kernels` and an attention backend.

It holds weights and rotary tables and nothing else: the KV belongs to the arena, the batch to the caller. Parameter
names equal those of the specs. It must never learn a family's name.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from tandem.architecture.feed_forward import GatedSpec, MixtureOfExpertsSpec
from tandem.architecture.model import EMBEDDING, HEAD, LayerSpec, ModelSpec
from tandem.architecture.rope import RopeSpec
from tandem.attention.arena import LayerKV
from tandem.attention.base import AttentionBackend, AttentionBatch, WantedTokens
from tandem.kernels.base import Kernels
from tandem.models.layers.attention import Attention
from tandem.models.layers.experts import MixtureOfExperts
from tandem.models.layers.linear import Norm
from tandem.models.layers.mlp import GatedMLP
from tandem.models.layers.rotary import RotaryTable, build_rotary_tables
from tandem.models.layers.stack import build_stack


class FeedForward(Protocol):
    """A feed-forward block. `graph_safe`: as `AttentionBackend.graph_safe`."""

    graph_safe: bool

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [num_tokens, hidden] -> the same shape."""
        ...


FEED_FORWARDS: dict[type, Callable[[Any, Mapping[str, torch.Tensor], Kernels], FeedForward]] = {
    GatedSpec: GatedMLP,
    MixtureOfExpertsSpec: MixtureOfExperts,
}


class DecoderLayer:
    """Computes a `LayerSpec`. Everything but the residual stream is local to a call."""

    def __init__(
        self,
        spec: LayerSpec,
        weights: Mapping[str, torch.Tensor],
        tables: Mapping[RopeSpec | None, RotaryTable],
        kernels: Kernels,
    ) -> None:
        self._kernels = kernels
        self._mixer = Attention(spec.mixer, weights, tables[spec.mixer.rope], kernels)
        self._feed_forward = FEED_FORWARDS[type(spec.feed_forward)](spec.feed_forward, weights, kernels)
        self._before_mixer = Norm.take_optional(spec.before_mixer, weights, kernels)
        self._after_mixer = Norm.take_optional(spec.after_mixer, weights, kernels)
        self._before_feed_forward = Norm.take_optional(spec.before_feed_forward, weights, kernels)
        self._after_feed_forward = Norm.take_optional(spec.after_feed_forward, weights, kernels)
        self._residual_scale = spec.residual_scale
        self.graph_safe = self._feed_forward.graph_safe

    def forward(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        positions: torch.Tensor,
        kv: LayerKV,
        batch: AttentionBatch,
        backend: AttentionBackend,
        wanted: WantedTokens | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the residual stream and the output that is still to be added to it.

        `x`: the output of the layer before, still to be added; None before the first. NOTE: `residual` is updated in
        place. With `wanted`, both results are of those tokens alone.
        """
        queries = self._mixer.write(add_and_norm(self._before_mixer, residual, x), positions, kv, batch)
        if wanted is not None:
            take = self._kernels.take_rows
            queries = take(queries.flatten(1), wanted.rows).view(-1, *queries.shape[1:])
            residual, batch = take(residual, wanted.rows), wanted.batch
        if not len(residual):
            return residual, residual
        mixed = self._finish(self._after_mixer, self._mixer.attend(queries, kv, batch, backend))
        x = self._feed_forward(add_and_norm(self._before_feed_forward, residual, mixed))
        return residual, self._finish(self._after_feed_forward, x)

    def _finish(self, norm: Norm | None, x: torch.Tensor) -> torch.Tensor:
        """A block's output as it joins the residual stream."""
        x = x if norm is None else norm(x)
        return x if self._residual_scale == 1.0 else x.mul_(self._residual_scale)


def add_and_norm(norm: Norm | None, residual: torch.Tensor, x: torch.Tensor | None) -> torch.Tensor:
    """The next block's input: `x` is added into `residual` in place, and the sum is normed."""
    if norm is None:
        return residual if x is None else residual.add_(x)
    return norm(residual) if x is None else norm(x, residual)


class Decoder:
    """Args:
    spec: the model to compute.
    weights: the tensors of `spec.tensors()`, of its dtype, on one device; matrices may be packed.
    kernels: the arithmetic.
    """

    def __init__(self, spec: ModelSpec, weights: Mapping[str, torch.Tensor], kernels: Kernels) -> None:
        self.spec = spec
        self.parameters = weights
        self._kernels = kernels
        self._embedding = weights[EMBEDDING]
        self._head = weights[HEAD] if HEAD in weights or not spec.tie_word_embeddings else self._embedding
        self._final_norm = Norm.take(spec.final_norm, weights, kernels)
        self._embedding_scale = _rounded(spec.embedding_scale, self._embedding.dtype)
        ropes = [layer.mixer.rope for layer in spec.layers]
        tables = build_rotary_tables(ropes, spec.max_position_embeddings, self._embedding.device)
        self._layers = tuple(DecoderLayer(layer, weights, tables, kernels) for layer in spec.layers)
        self._stack = build_stack(spec, weights, tables, kernels)
        self.graph_safe = all(layer.graph_safe for layer in self._layers)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: Sequence[LayerKV],
        batches: Sequence[AttentionBatch],
        backend: AttentionBackend,
        wanted: WantedTokens | None = None,
    ) -> torch.Tensor:
        """Hidden states after the final norm, [num_tokens, hidden]; writes the step's K and V into `kv`.

        Args:
            input_ids, positions: [num_tokens] int64, requests concatenated.
            kv, batches: one entry per layer; layers of a group share the batch object.
            wanted: the tokens whose hidden states are asked for, and returned; None = all.
        """
        residual = self._embed(input_ids)
        if self._stack is not None and backend.name == self._stack.attention:
            return self._stack.forward(residual, positions, kv, batches, wanted)
        x: torch.Tensor | None = None
        for index, layer in enumerate(self._layers):
            asked = wanted if index == len(self._layers) - 1 else None
            residual, x = layer.forward(x, residual, positions, kv[index], batches[index], backend, asked)
        return add_and_norm(self._final_norm, residual, x)

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """[n, hidden] -> [n, vocab] float32, scaled and soft-capped as the spec says. `rows`: int64, of these alone."""
        if rows is not None:
            hidden = self._kernels.take_rows(hidden, rows)
        logits = self._kernels.linear(hidden, self._head, out_dtype=torch.float32)
        cap, scale = self.spec.logit_softcap, self.spec.logit_scale
        logits = logits if scale == 1.0 else logits.mul_(scale)
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def _embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self._kernels.take_rows(self._embedding, input_ids)
        return hidden if self._embedding_scale == 1.0 else hidden.mul_(self._embedding_scale)


def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=dtype))
