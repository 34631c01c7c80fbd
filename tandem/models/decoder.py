"""The decoder-only transformer that every family is: driven by `ModelConfig`, over `Kernels` and an attention backend.

It holds weights and rotary tables and nothing else: the KV belongs to the arena, the batch to the caller. Parameter
names equal Hugging Face's. It must never learn a family's name.
"""

from collections.abc import Mapping, Sequence

import torch

from tandem.attention.arena import LayerKV
from tandem.attention.base import AttentionBackend, AttentionBatch, WantedTokens
from tandem.kernels.base import Kernels
from tandem.models.config import LayerConfig, ModelConfig
from tandem.models.layers.attention import Attention
from tandem.models.layers.mlp import GatedMLP
from tandem.models.layers.rotary import RotaryTable, build_rotary_tables
from tandem.models.layers.stack import build_stack
from tandem.models.parameters import EMBEDDING, FINAL_NORM, HEAD


class DecoderLayer:
    """Attention and feed-forward with their norms. Everything but the residual stream is local to a call."""

    def __init__(
        self,
        config: ModelConfig,
        layer: LayerConfig,
        weights: Mapping[str, torch.Tensor],
        prefix: str,
        rotary: RotaryTable,
        kernels: Kernels,
    ) -> None:
        self._config = config
        self._kernels = kernels
        self._attention = Attention(config, layer, weights, f"{prefix}.self_attn", rotary, kernels)
        self._mlp = GatedMLP(weights, f"{prefix}.mlp", config.activation, kernels)
        self.input_norm = weights[f"{prefix}.input_layernorm.weight"]
        self._after_attention = weights[f"{prefix}.post_attention_layernorm.weight"]
        self._before_mlp = weights.get(f"{prefix}.pre_feedforward_layernorm.weight")
        self._after_mlp = weights.get(f"{prefix}.post_feedforward_layernorm.weight")

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        positions: torch.Tensor,
        kv: LayerKV,
        batch: AttentionBatch,
        backend: AttentionBackend,
        wanted: WantedTokens | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`x` is the normed input; returns the residual stream and what the next norm is to add to it.

        NOTE: `residual` is updated in place. With `wanted`, both are of those tokens alone.
        """
        queries = self._attention.write(x, positions, kv, batch)
        if wanted is not None:
            take = self._kernels.take_rows
            queries = take(queries.flatten(1), wanted.rows).view(-1, *queries.shape[1:])
            residual, batch = take(residual, wanted.rows), wanted.batch
        if not len(residual):
            return residual, residual
        x = self._attention.attend(queries, kv, batch, backend)
        x = self._norm_into_mlp(x, residual)
        x = self._mlp.forward(x)
        return residual, x if self._after_mlp is None else self._norm(x, self._after_mlp)

    def _norm_into_mlp(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if self._before_mlp is None:
            return self._norm(x, self._after_attention, residual)
        return self._norm(self._norm(x, self._after_attention), self._before_mlp, residual)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        offset = self._config.unit_offset_norm
        return self._kernels.rms_norm(x, weight, self._config.rms_norm_eps, residual=residual, unit_offset=offset)


class Decoder:
    """Args:
    config: what to compute.
    weights: the tensors of `parameter_shapes(config)`, of the configured dtype, on one device; matrices may be packed.
    kernels: the arithmetic.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor], kernels: Kernels) -> None:
        self.config = config
        self.parameters = weights
        self._kernels = kernels
        self._embedding = weights[EMBEDDING]
        self._head = weights[HEAD] if HEAD in weights or not config.tie_word_embeddings else self._embedding
        self._final_norm = weights[FINAL_NORM]
        self._embedding_scale = _rounded(config.embedding_scale, self._embedding.dtype)
        ropes = [layer.rope for layer in config.layers]
        tables = build_rotary_tables(ropes, config.max_position_embeddings, self._embedding.device)
        self._layers = tuple(
            DecoderLayer(config, layer, weights, f"model.layers.{index}", tables[layer.rope], kernels)
            for index, layer in enumerate(config.layers)
        )
        self._stack = build_stack(config, weights, tables, kernels)

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
            normed = self._norm(residual, layer.input_norm, x)
            residual, x = layer.forward(normed, residual, positions, kv[index], batches[index], backend, asked)
        return self._norm(residual, self._final_norm, x)

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """[n, hidden] -> [n, vocab] float32, soft-capped where the model says so. `rows`: int64, of these alone."""
        if rows is not None:
            hidden = self._kernels.take_rows(hidden, rows)
        logits = self._kernels.linear(hidden, self._head, out_dtype=torch.float32)
        cap = self.config.logit_softcap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def _embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self._kernels.take_rows(self._embedding, input_ids)
        return hidden if self._embedding_scale == 1.0 else hidden.mul_(self._embedding_scale)

    def _norm(self, residual: torch.Tensor, weight: torch.Tensor, x: torch.Tensor | None) -> torch.Tensor:
        """Adds `x` into `residual` first, where there is one."""
        eps, offset = self.config.rms_norm_eps, self.config.unit_offset_norm
        if x is None:
            return self._kernels.rms_norm(residual, weight, eps, unit_offset=offset)
        return self._kernels.rms_norm(x, weight, eps, residual=residual, unit_offset=offset)


def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=dtype))
