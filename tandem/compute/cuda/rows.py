"""Launches Tandem's Triton kernels for single rows: norms, gated products, rotary embedding and the write of K and V.

Each is one kernel where PyTorch needs up to 42 operations. Unsupported calls return None or False and are left to
PyTorch. Never synchronises with the device.
"""

import importlib
from types import ModuleType

import torch

from tandem.architecture.feed_forward import Activation

KERNELS = "tandem.compute.cuda.triton_rows"  # imported when first used, since it needs triton
MAX_ROW = 65536  # numbers of a row, which are in one program's registers
GATED_TILE = 1024  # numbers that one program computes of a gated product
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def gated_product(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor | None:
    """`activation(gate) * up`, see `Kernels.gated_product`; None = not supported."""
    if gate.shape != up.shape or gate.dtype not in _FLOATS:
        return None
    gates, ups = _rows(gate), _rows(up)
    if gates is None or ups is None:
        return None
    kernels = _kernels()
    num_rows, size = gates.shape
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        tile = min(GATED_TILE, _power_of_two(size))
        kind = kernels.SILU if activation == "silu" else kernels.GELU_TANH
        kernels.gated_kernel[(num_rows, -(-size // tile))](
            out, gates, ups, size, gates.stride(0), ups.stride(0), ACTIVATION=kind, TILE=tile, **_options(tile)
        )
    return out


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, unit_offset: bool
) -> torch.Tensor | None:
    """Root-mean-square norm of each row, see `Kernels.rms_norm`; None = not supported."""
    if x.dtype not in _FLOATS or x.shape[-1] > MAX_ROW or weight.stride() != (1,):
        return None
    rows, sums = _rows(x), None if residual is None else _rows(residual)
    if rows is None or (residual is not None and (sums is None or residual.dtype != x.dtype)):
        return None
    sums = rows if sums is None else sums
    size = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        tile = _power_of_two(size)
        _kernels().norm_kernel[(rows.shape[0],)](
            out, rows, sums, weight, eps, rows.stride(0), sums.stride(0),
            SIZE=size, TILE=tile, HAS_RESIDUAL=residual is not None, UNIT_OFFSET=unit_offset, **_options(tile),
        )  # fmt: skip
    return out


def rope(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    norm_eps: float,
    unit_offset: bool,
) -> bool:
    """Rotates `q` and k by their positions and writes K and V into the cache, as `Kernels.rope_and_write`; without `kv`
    only rotates `q`, as `Kernels.rotate`. `kv`: k, v, the slots and the caches of K and V. Returns whether it was done;
    False = not supported, and nothing has changed.
    """
    k, v, slots, k_cache, v_cache = (q, q, positions, q, q) if kv is None else kv
    num_kv_heads, block_size = (0, 1) if kv is None else (k.shape[1], k_cache.shape[2])
    strides = (0, 0, 0) if kv is None else k_cache.stride()[:3]
    num_tokens, num_heads, head_dim = q.shape
    half = cos.shape[-1]
    parts = (q, k, v, cos, sin, k_cache, v_cache, *(norm for norm in (q_norm, k_norm) if norm is not None))
    if any(part.numel() and part.stride(-1) != 1 for part in parts):
        return False
    if q.dtype not in _FLOATS or any(part.dtype != q.dtype for part in (k, v, k_cache, v_cache)):
        return False
    if k_cache.stride() != v_cache.stride() or cos.stride() != sin.stride() or cos.dtype != torch.float32:
        return False
    if num_tokens == 0:
        return True
    tile, rest = _power_of_two(half), head_dim - 2 * half
    _kernels().rope_kernel[(num_tokens, num_heads + 2 * num_kv_heads)](
        q, k, v, cos, sin, positions, slots, k_cache, v_cache,
        q if q_norm is None else q_norm, q if k_norm is None else k_norm, norm_eps,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], cos.stride(0), *strides,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HALF=half, REST=rest, BLOCK_SIZE=block_size,
        TILE_HALF=tile, TILE_REST=_power_of_two(rest), HAS_Q_NORM=q_norm is not None, HAS_K_NORM=k_norm is not None,
        UNIT_OFFSET=unit_offset, num_warps=1,
    )  # fmt: skip
    return True


def _kernels() -> ModuleType:
    return importlib.import_module(KERNELS)


def _rows(x: torch.Tensor) -> torch.Tensor | None:
    """`x` as [num_rows, size] without a copy; None = the distance between its rows is not constant."""
    if x.numel() and x.stride(-1) != 1:
        return None
    try:
        return x.view(-1, x.shape[-1]) if x.numel() else x.reshape(0, x.shape[-1])
    except RuntimeError:
        return None


def _options(tile: int) -> dict[str, int]:
    """Number of warps of a program: 8 numbers per thread, at most 16 warps."""
    return {"num_warps": max(1, min(16, tile // 256))}


def _power_of_two(minimum: int) -> int:
    return 1 << (max(1, minimum) - 1).bit_length()
