"""Bindings of the compiled kernels as methods on tensors: they check shapes, pass pointers and allocate results.

A row's result is bit-identical whatever else is in the call and however many threads run. Nothing here keeps a tensor
or a pointer after the call. A wrong shape or dtype is our own bug and asserts; out-of-range indices are not checked.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch

from tandem.architecture.feed_forward import Activation, Clamp, RouterSpec
from tandem.compute.native.arguments import are_blocks, are_paged, has_contiguous_rows, norm_weights, row_strides
from tandem.compute.native.build import load_library
from tandem.compute.native.calls import bind
from tandem.compute.native.coded import NativeCodedProducts
from tandem.compute.native.codes import ACTIVATION_CODES, DTYPE_CODES
from tandem.compute.native.expert_choice import NativeExpertChoice
from tandem.compute.native.experts import NativeExperts
from tandem.compute.native.stack import NativeStack, serves
from tandem.compute.native.structs import FIELDS
from tandem.compute.ops import ExpertWeights, StackLayer, StackShape
from tandem.compute.order import Order
from tandem.core.errors import ConfigurationError


def load(cache_dir: Path | None = None, architecture: str = "native") -> "NativeKernels":
    """Compiles the kernels if needed, and loads them; see `build`.

    Raises:
        ConfigurationError: the kernels cannot be compiled or loaded on this machine; the message says why.
    """
    return NativeKernels(load_library(cache_dir, architecture=architecture))


def unavailable_reason(cache_dir: Path | None = None) -> str | None:
    """Message of the error that `load` would raise here; None = it would not fail."""
    try:
        load(cache_dir)
    except ConfigurationError as error:
        return str(error)
    return None


class NativeKernels(NativeCodedProducts):
    """Implements `Kernels` (`compute.ops` describes its methods) with the compiled functions, and paged attention.
    Stateless and safe to share.
    """

    name = "native"

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        self._linear = bind(library, "tandem_linear", FIELDS["tandem_linear"])
        self._linear_by_head = bind(library, "tandem_linear_by_head", FIELDS["tandem_linear_by_head"])
        self._paged_attention = bind(library, "tandem_paged_attention", FIELDS["tandem_paged_attention"])
        self._rms_norm = bind(library, "tandem_rms_norm", FIELDS["tandem_rms_norm"])
        self._rope_and_write = bind(library, "tandem_rope_and_write", FIELDS["tandem_rope_and_write"])
        self._gated_linear = bind(library, "tandem_gated_linear", FIELDS["tandem_gated_linear"])
        self._gated_product = bind(library, "tandem_gated_product", FIELDS["tandem_gated_product"])
        self._balance = bind(library, "tandem_balance", FIELDS["tandem_balance"])
        self._stack = bind(library, "tandem_stack", FIELDS["tandem_stack"])
        self._experts = bind(library, "tandem_experts", FIELDS["tandem_experts"])
        self._choose_experts = bind(library, "tandem_choose_experts", FIELDS["tandem_choose_experts"])
        self._take_rows = bind(library, "tandem_take_rows", FIELDS["tandem_take_rows"])

    def take_rows(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """NOTE: PyTorch's own wakes OpenMP threads, which then spin on the cores that the next kernel needs."""
        size = x.shape[1]
        out = x.new_empty(indices.shape[0], size)
        assert has_contiguous_rows(x)
        assert indices.dtype == torch.int64
        assert indices.is_contiguous()
        strides = x.stride(0) * x.itemsize, size * x.itemsize
        pointers = x.data_ptr(), indices.data_ptr(), out.data_ptr()
        self._take_rows(*pointers, *strides, indices.shape[0], torch.get_num_threads())
        return out

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        order: Order = Order.ROWS,
        sum_blocks: int = 1,
    ) -> torch.Tensor:
        (m, k), n = x.shape, weight.shape[0]
        if out is None:
            out = x.new_empty(m, n) if out_dtype is None else torch.empty(m, n, dtype=out_dtype)
        assert weight.shape[1] == k
        assert are_blocks(sum_blocks, k)
        assert weight.dtype == x.dtype
        assert weight.is_contiguous()
        assert has_contiguous_rows(x)
        assert out.shape == (m, n)
        assert has_contiguous_rows(out)
        assert out.dtype in (x.dtype, torch.float32)
        assert bias is None or (bias.dtype == x.dtype and bias.shape == (n,) and bias.is_contiguous())
        self._linear(
            *(DTYPE_CODES[x.dtype], DTYPE_CODES[out.dtype]),
            *(x.data_ptr(), x.stride(0), weight.data_ptr()),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            m,
            n,
            k,
            sum_blocks,
            order,
            torch.get_num_threads(),
        )
        return out

    def linear_by_head(self, x: torch.Tensor, weight: torch.Tensor, *, order: Order = Order.ROWS) -> torch.Tensor:
        (m, heads, k), n = x.shape, weight.shape[1]
        out = x.new_empty(m, heads, n)
        assert weight.shape == (heads, n, k)
        assert weight.dtype == x.dtype
        assert weight.is_contiguous()
        assert x.stride(2) == 1
        where = x.data_ptr(), *x.stride()[:2], weight.data_ptr(), out.data_ptr(), heads * n
        self._linear_by_head(DTYPE_CODES[x.dtype], *where, m, heads, n, k, order, torch.get_num_threads())
        return out

    def gated_linear(
        self,
        x: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor,
        activation: Activation,
        gate_bias: torch.Tensor | None = None,
        up_bias: torch.Tensor | None = None,
        *,
        order: Order = Order.ROWS,
    ) -> torch.Tensor:
        m, k = x.shape
        n = gate.shape[0]
        out = x.new_empty(m, n)
        assert gate.shape == up.shape == (n, k)
        assert gate.dtype == up.dtype == x.dtype
        assert gate.is_contiguous()
        assert up.is_contiguous()
        assert has_contiguous_rows(x)
        assert all(
            b is None or (b.dtype == x.dtype and b.shape == (n,) and b.stride() == (1,)) for b in (gate_bias, up_bias)
        )
        self._gated_linear(
            DTYPE_CODES[x.dtype],
            ACTIVATION_CODES[activation],
            x.data_ptr(),
            x.stride(0),
            gate.data_ptr(),
            up.data_ptr(),
            0 if gate_bias is None else gate_bias.data_ptr(),
            0 if up_bias is None else up_bias.data_ptr(),
            out.data_ptr(),
            n,
            m,
            n,
            k,
            order,
            torch.get_num_threads(),
        )
        return out

    def gated_product(self, gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
        m, n = gate.shape
        out = gate.new_empty(m, n)
        assert up.shape == (m, n)
        assert gate.dtype == up.dtype
        assert has_contiguous_rows(gate)
        assert has_contiguous_rows(up)
        self._gated_product(
            DTYPE_CODES[gate.dtype],
            ACTIVATION_CODES[activation],
            gate.data_ptr(),
            gate.stride(0),
            up.data_ptr(),
            up.stride(0),
            out.data_ptr(),
            n,
            m,
            n,
            torch.get_num_threads(),
        )
        return out

    def sinkhorn(self, logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
        num_tokens, size, _ = logits.shape
        out = logits.new_empty(num_tokens, size, size)
        assert logits.dtype == torch.float32
        assert logits.stride()[1:] == (size, 1)
        sizes = num_tokens, size, iterations, eps, torch.get_num_threads()
        self._balance(logits.data_ptr(), logits.stride(0), out.data_ptr(), *sizes)
        return out

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
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of each request's newest tokens over its whole context, which the cache already holds.

        Args:
            q: [num_tokens, num_heads, head_dim], requests concatenated; head_dim a multiple of 8, at most 576.
            k_cache, v_cache: [num_blocks, num_kv_heads, block_size, head_dim], each block contiguous.
            block_tables: [num_requests, max_blocks] int32. Entries wholly before a window are never read.
            query_start: [num_requests + 1] int32, cumulative query lengths.
            seq_lens: [num_requests] int32, context lengths including this step's tokens.
            scale: multiplies q . k.
            window: key j is visible to query i iff 0 <= i - j < window; 0 = every earlier key.
            softcap: scores become softcap * tanh(score / softcap); 0 = off.
            sinks: [num_heads] float32, a score for each head that joins the softmax and has no value.
        """
        out = torch.empty_like(q)
        (_, num_heads, head_dim), (_, num_kv_heads, block_size, cached_dim) = q.shape, k_cache.shape
        q_token_stride, q_head_stride, q_stride = q.stride()
        out_token_stride, out_head_stride, out_stride = out.stride()
        num_requests = seq_lens.shape[0]
        assert head_dim % 8 == 0
        assert head_dim <= 576
        assert num_heads % num_kv_heads == 0
        assert cached_dim == head_dim
        assert q.dtype == k_cache.dtype == v_cache.dtype
        assert q_stride == out_stride == 1
        assert are_paged(k_cache, v_cache)
        assert block_tables.dtype == query_start.dtype == seq_lens.dtype == torch.int32
        assert block_tables.stride(1) == 1
        assert all(x.is_contiguous() for x in (query_start, seq_lens))
        assert block_tables.shape[0] == num_requests
        assert query_start.shape[0] == num_requests + 1
        assert sinks is None or (sinks.shape == (num_heads,) and sinks.dtype == torch.float32 and sinks.is_contiguous())
        self._paged_attention(
            DTYPE_CODES[q.dtype],
            q.data_ptr(),
            q_token_stride,
            q_head_stride,
            k_cache.data_ptr(),
            k_cache.stride(0),
            v_cache.data_ptr(),
            v_cache.stride(0),
            block_tables.data_ptr(),
            block_tables.stride(0),
            query_start.data_ptr(),
            seq_lens.data_ptr(),
            out.data_ptr(),
            out_token_stride,
            out_head_stride,
            num_requests,
            num_heads,
            num_kv_heads,
            head_dim,
            block_size,
            scale,
            window,
            softcap,
            0 if sinks is None else sinks.data_ptr(),
            torch.get_num_threads(),
        )
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
        size = x.shape[-1]
        out = torch.empty_like(x)
        assert x.stride(-1) == 1
        assert weight.shape == (size,)
        assert weight.is_contiguous()
        assert residual is None or (residual.shape == x.shape and residual.dtype == x.dtype)
        assert residual is None or residual.stride(-1) == 1
        self._rms_norm(
            DTYPE_CODES[x.dtype],
            x.data_ptr(),
            *row_strides(x),
            *((0, 0, 0) if residual is None else (residual.data_ptr(), *row_strides(residual))),
            out.data_ptr(),
            *row_strides(out),
            weight.data_ptr(),
            DTYPE_CODES[weight.dtype],
            unit_offset,
            eps,
            x.shape[0],
            1 if x.dim() == 2 else x.shape[1],
            size,
            torch.get_num_threads(),
        )
        return out

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
        num_tokens, _, head_dim = q.shape
        _, num_kv_heads, block_size, _ = k_cache.shape
        *k_strides, k_stride = k.stride()
        *v_strides, v_stride = v.stride()
        assert k.shape == v.shape == (num_tokens, num_kv_heads, head_dim)
        assert q.dtype == k.dtype == v.dtype == k_cache.dtype == v_cache.dtype
        assert k_stride == v_stride == 1
        assert are_paged(k_cache, v_cache)
        assert positions.shape == slot_mapping.shape
        assert slot_mapping.dtype == torch.int64
        assert slot_mapping.is_contiguous()
        caches = k_cache.data_ptr(), k_cache.stride(0), v_cache.data_ptr(), v_cache.stride(0)
        written = k.data_ptr(), *k_strides, v.data_ptr(), *v_strides
        norms = *norm_weights(q_norm, k_norm, head_dim), unit_offset
        where = slot_mapping.data_ptr(), *caches
        self._rotate(q, cos, sin, positions, written, where, norms, norm_eps, num_kv_heads, block_size)

    def rotate(
        self,
        q: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        *,
        norm: torch.Tensor | None = None,
        norm_eps: float = 1e-6,
        unit_offset: bool = False,
    ) -> None:
        """NOTE: it is `rope_and_write` with no heads of K and V."""
        norms = *norm_weights(norm, None, q.shape[2]), unit_offset
        self._rotate(q, cos, sin, positions, (0,) * 6, (0,) * 5, norms, norm_eps, 0, 1)

    def _rotate(
        self,
        q: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        written: tuple[int, ...],
        where: tuple[int, ...],
        norms: tuple[int, ...],
        norm_eps: float,
        num_kv_heads: int,
        block_size: int,
    ) -> None:
        """`written`: K and V, a pointer and two strides each. `where`: slots, then both caches with block strides."""
        num_tokens, num_heads, head_dim = q.shape
        half = cos.shape[1]
        *strides, stride = q.stride()
        assert 2 * half <= head_dim <= 512
        assert stride == 1
        assert cos.shape == sin.shape
        assert cos.dtype == sin.dtype == torch.float32
        assert cos.is_contiguous()
        assert sin.is_contiguous()
        assert positions.shape == (num_tokens,)
        assert positions.dtype == torch.int64
        assert positions.is_contiguous()
        tables = cos.data_ptr(), sin.data_ptr(), positions.data_ptr()
        sizes = num_tokens, num_heads, num_kv_heads, head_dim, half, block_size, torch.get_num_threads()
        dtype = DTYPE_CODES[q.dtype]
        self._rope_and_write(dtype, q.data_ptr(), *strides, *written, *tables, *where, *norms, norm_eps, *sizes)

    def stack(self, shape: StackShape, layers: Sequence[StackLayer], final_norm: torch.Tensor) -> NativeStack | None:
        return NativeStack(self._stack, shape, layers, final_norm) if serves(shape, layers, final_norm) else None

    def experts(
        self, activation: Activation, clamp: Clamp | None, experts: Sequence[ExpertWeights]
    ) -> NativeExperts | None:
        return NativeExperts.build(self._experts, activation, clamp, experts)

    def expert_choice(
        self, spec: RouterSpec, correction: torch.Tensor | None, expert_scales: torch.Tensor | None
    ) -> NativeExpertChoice | None:
        return NativeExpertChoice.build(self._choose_experts, spec, correction, expert_scales)
