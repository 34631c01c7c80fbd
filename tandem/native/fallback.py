"""The kernels in plain PyTorch, on any device: they define what the compiled ones mean.

Everything is computed in float32 and rounded once. Written to be read; not batch-invariant and not fast.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": F.silu, "gelu_tanh": _gelu_tanh}


class TorchKernels:
    """Same methods as `tandem.native.library.NativeKernels`. Stateless."""

    name = "torch"

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """`x @ weight.T + bias`.

        Args:
            x: [num_tokens, in], rows contiguous, row stride free.
            weight: [out, in], contiguous, of x's dtype.
            bias: [out], of x's dtype.
            out: [num_tokens, out] to write into, of x's dtype or float32; allocated when not given.
            out_dtype: dtype of the allocated result: x's (default) or float32.
        """
        result = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        if out is None:
            return result.to(out_dtype or x.dtype)
        return out.copy_(result)

    def gated_linear(self, x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
        """`activation(x @ gate.T) * (x @ up.T)` with activation "silu" or "gelu_tanh"; gate and up are [out, in]."""
        gated = F.linear(x.float(), gate.float())
        activated = _ACTIVATIONS[activation](gated)
        return (activated * F.linear(x.float(), up.float())).to(x.dtype)

    def paged_attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_tables: torch.Tensor,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of each request's newest tokens over its whole context, which the cache already holds.

        Args:
            q: [num_tokens, num_heads, head_dim], requests concatenated; head_dim a multiple of 8, at most 256.
            k_cache, v_cache: [num_blocks, num_kv_heads, block_size, head_dim], each block contiguous.
            block_tables: [num_requests, max_blocks] int32. Entries wholly before a window are never read.
            query_start: [num_requests + 1] int32, cumulative query lengths.
            seq_lens: [num_requests] int32, context lengths including this step's tokens.
            scale: multiplies q . k.
            window: key j is visible to query i iff 0 <= i - j < window; 0 = every earlier key.
            softcap: scores become softcap * tanh(score / softcap); 0 = off.
            out: [num_tokens, num_heads, head_dim] to write into; allocated when not given.
        """
        out = torch.empty_like(q) if out is None else out
        for request, (start, end) in enumerate(_spans(query_start)):
            seq_len = int(seq_lens[request])
            positions = torch.arange(seq_len - (end - start), seq_len, device=q.device)
            first = max(0, seq_len - (end - start) - window + 1) if window else 0
            keys = torch.arange(first, seq_len, device=q.device)
            k, v = (_gather(cache, block_tables[request], keys) for cache in (k_cache, v_cache))
            visible = _visible(positions, keys, window)
            out[start:end] = _attend(q[start:end].float(), k, v, visible, scale, softcap)
        return out

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        residual: torch.Tensor | None = None,
        unit_offset: bool = False,
    ) -> torch.Tensor:
        """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension.

        Args:
            x: [num_tokens, hidden] or [num_tokens, num_heads, head_dim]; only the last dimension need be contiguous.
            weight: [hidden] or [head_dim], of x's dtype or float32.
            eps: added to the mean square.
            residual: like x; becomes residual + x (rounded to its dtype), and the norm is taken of that.
            unit_offset: multiply by 1 + weight instead (Gemma).
        """
        if residual is not None:
            x = residual.copy_(residual.float() + x.float())
        normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        return (normed * (weight.float() + 1.0 if unit_offset else weight.float())).to(x.dtype)

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
        """Rotates q and k in place (after an optional per-head RMS norm) and stores k and v in the paged cache.

        The rotation is the half-split one (RoFormer, section 3.4, in the layout of GPT-NeoX): element d pairs with
        d + rotary_dim / 2, and elements from rotary_dim on pass through. Rounded once, after the rotation.

        Args:
            q: [num_tokens, num_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim]; token strides free.
            cos, sin: [max_positions, rotary_dim / 2] float32, contiguous.
            positions: [num_tokens] int64, rows of cos and sin.
            slot_mapping: [num_tokens] int64, block * block_size + offset; -1 is not written.
            k_cache, v_cache: [num_blocks, num_kv_heads, block_size, head_dim], each block contiguous.
            q_norm, k_norm: [head_dim] weights of the per-head norm, of q's dtype or float32.
            norm_eps, unit_offset: as in `rms_norm`.
        """
        for heads, weight in ((q, q_norm), (k, k_norm)):
            normed = heads.float()
            if weight is not None:
                normed = self.rms_norm(normed, weight, norm_eps, unit_offset=unit_offset)
            heads.copy_(_rotate(normed, cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)))
        written = slot_mapping >= 0
        block, offset = (slot_mapping[written] // k_cache.shape[2], slot_mapping[written] % k_cache.shape[2])
        k_cache[block, :, offset] = k[written]
        v_cache[block, :, offset] = v[written]


def _spans(query_start: torch.Tensor) -> Iterator[tuple[int, int]]:
    bounds = query_start.tolist()
    return itertools.pairwise(bounds)


def _gather(cache: torch.Tensor, block_table: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Keys' rows of one request: [num_keys, num_kv_heads, head_dim] float32."""
    block_size = cache.shape[2]
    return cache[block_table[keys // block_size].long(), :, keys % block_size].float()


def _visible(positions: torch.Tensor, keys: torch.Tensor, window: int) -> torch.Tensor:
    """[num_queries, num_keys] bool."""
    distance = positions[:, None] - keys[None, :]
    return (distance >= 0) & (distance < window) if window else distance >= 0


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float, softcap: float
) -> torch.Tensor:
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[2])  # [num_queries, num_kv_heads, group, head_dim]
    scores = torch.einsum("qhgd,khd->hgqk", grouped, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hgqk,khd->qhgd", weights, v).flatten(1, 2)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)
