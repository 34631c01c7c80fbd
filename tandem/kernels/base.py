"""The seam between the decoder and its compiled arithmetic: matrix products, norms, rotary embedding.

Everything here is row-wise: a token's result never depends on which other tokens share the call. The native CPU
implementation keeps that bit for bit, which is what makes batched equal alone in bfloat16 too.
"""

from typing import Literal, Protocol

import torch

Activation = Literal["silu", "gelu_tanh"]


class Kernels(Protocol):
    """Implemented by `tandem.kernels.native` (compiled, CPU) and `tandem.kernels.torch_kernels` (any device)."""

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """`x` [num_tokens, in] times `weight` [out, in] transposed, plus bias; accumulated in float32, rounded once."""
        ...

    def gated_linear(
        self, x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: Activation
    ) -> torch.Tensor:
        """`activation(x @ gate.T) * (x @ up.T)`: [num_tokens, in] -> [num_tokens, ffn]."""
        ...

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        residual: torch.Tensor | None = None,
        unit_offset: bool = False,
    ) -> torch.Tensor:
        """Root-mean-square norm over the last dimension, times `weight` (`1 + weight` with `unit_offset`, as Gemma has
        it). With `residual`, first adds `x` into it in place and norms the sum.
        """
        ...

    def rope_and_write(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        norm_eps: float = 1e-6,
        unit_offset: bool = False,
    ) -> None:
        """Rotate `q` [num_tokens, num_heads, head_dim] and `k` [num_tokens, num_kv_heads, head_dim] in place (after an
        optional per-head norm) and store `k` and `v` in the paged cache. `cos`, `sin`: float32 [max_positions,
        rotary_dim / 2]; half-split convention. A token of slot -1 is stored nowhere
        but perhaps in the null block, which nobody reads.
        """
        ...
