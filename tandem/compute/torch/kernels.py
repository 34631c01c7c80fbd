"""`Kernels` in plain PyTorch, for any device, and as readable definition of the compiled ones.

Norms, rotary embedding and activations are computed in float32 and rounded once. Everything is row-wise, but PyTorch's
matrix products may differ in the last bit with the number of rows: only the native kernels promise equal bits.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch.nn import functional

from tandem.architecture.feed_forward import Activation, Clamp, RouterSpec
from tandem.compute.codes import CodedMatrix
from tandem.compute.ops import ExpertChoice, Experts, ExpertWeights, StackLayer, StackShape
from tandem.compute.order import Order
from tandem.compute.rounded_rows import round_rows

_DECODED_NUMBERS = 1 << 22  # at a time


class TorchKernels:
    """Implements `Kernels`, whose methods `compute.ops` describes; stateless."""

    name = "torch"

    def take_rows(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, indices)

    def can_pack(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        return False

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("PyTorch multiplies by weights as they are")

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        order: Order = Order.ROWS,
        sum_blocks: int = 1,
    ) -> torch.Tensor:
        """NOTE: the product is rounded to the dtype of `x` before it is widened to `out_dtype`."""
        assert order is Order.ROWS
        return functional.linear(x, weight, bias).to(out_dtype or x.dtype)

    def can_pack_coded(self, matrix: CodedMatrix) -> bool:
        return False

    def pack_coded(self, matrix: CodedMatrix) -> CodedMatrix:
        raise NotImplementedError("PyTorch multiplies by codes as they are")

    def coded_rows(self, matrix: CodedMatrix, indices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return matrix.decode_rows(indices, dtype)

    def coded_linear(
        self,
        x: torch.Tensor,
        matrix: CodedMatrix,
        bias: torch.Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """NOTE: numbers are rounded to the dtype of `x`, a few rows at a time so that memory stays small. If rows are
        rounded to 8 bits, the product is in float32.
        """
        outputs, inputs = matrix.shape
        if matrix.rounds_rows:
            return self._rounding_linear(x, matrix, bias).to(out_dtype or x.dtype)
        rows = max(1, _DECODED_NUMBERS // inputs)
        parts = [
            functional.linear(x, matrix.decode(x.dtype, start=start, stop=start + rows))
            for start in range(0, outputs, rows)
        ]
        product = torch.cat(parts, dim=1)
        return (product if bias is None else product.add_(bias)).to(out_dtype or x.dtype)

    def _rounding_linear(self, x: torch.Tensor, matrix: CodedMatrix, bias: torch.Tensor | None) -> torch.Tensor:
        plain = replace(matrix, rounds_rows=False, permutation=None)
        ordered = x if matrix.permutation is None else x[:, matrix.permutation]
        rows = round_rows(ordered, matrix.segment_size)
        return self.coded_linear(rows, plain, None if bias is None else bias.float())

    def linear_by_head(self, x: torch.Tensor, weight: torch.Tensor, *, order: Order = Order.ROWS) -> torch.Tensor:
        return torch.einsum("nhi,hoi->nho", x, weight)

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
        assert order is Order.ROWS
        return self.gated_product(functional.linear(x, gate, gate_bias), functional.linear(x, up, up_bias), activation)

    def coded_gated_linear(
        self,
        x: torch.Tensor,
        gate: CodedMatrix,
        up: CodedMatrix,
        activation: Activation,
        gate_bias: torch.Tensor | None = None,
        up_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.gated_product(self.coded_linear(x, gate, gate_bias), self.coded_linear(x, up, up_bias), activation)

    def gated_product(self, gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
        wide = gate.float()
        wide = functional.silu(wide) if activation == "silu" else functional.gelu(wide, approximate="tanh")
        return wide.mul_(up).to(gate.dtype)

    def sinkhorn(self, logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
        """NOTE: sums are added one by one, which a reduction need not do in the same order for every shape."""
        mix = logits.softmax(-1) + eps
        for i in range(iterations):
            if i:
                mix = mix / (reduce(torch.add, mix.unbind(2)).unsqueeze(2) + eps)
            mix = mix / (reduce(torch.add, mix.unbind(1)).unsqueeze(1) + eps)
        return mix

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        residual: torch.Tensor | None = None,
        unit_offset: bool = False,
    ) -> torch.Tensor:
        wide = (x if residual is None else residual.add_(x)).float()
        return _normed(wide, weight, eps, unit_offset).to(x.dtype)

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
        for x, norm in ((q, q_norm), (k, k_norm)):
            self.rotate(x, cos, sin, positions, norm=norm, norm_eps=norm_eps, unit_offset=unit_offset)
        _write(k, k_cache, slot_mapping)
        _write(v, v_cache, slot_mapping)

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
        wide = q.float() if norm is None else _normed(q.float(), norm, norm_eps, unit_offset)
        q.copy_(_rotated(wide, cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)))

    def stack(self, shape: StackShape, layers: Sequence[StackLayer], final_norm: torch.Tensor) -> None:
        """None: there is no such call."""

    def experts(self, activation: Activation, clamp: Clamp | None, experts: Sequence[ExpertWeights]) -> Experts | None:
        return None

    def expert_choice(
        self, spec: RouterSpec, correction: torch.Tensor | None, expert_scales: torch.Tensor | None
    ) -> ExpertChoice | None:
        return None


def _normed(wide: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool) -> torch.Tensor:
    factor = weight.float() + 1.0 if unit_offset else weight.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * factor


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[num_tokens, heads, head_dim] with `cos`, `sin` [num_tokens, 1, rotary_dim / 2]; element i turns with i +
    rotary_dim / 2, elements past rotary_dim stay.
    """
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]), dim=-1)


def _write(x: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Writes `x` [num_tokens, heads, head_dim] into `cache` [num_blocks, heads, block_size, head_dim].

    NOTE: tokens without a slot go to the null block, whose content is never read; no data-dependent shape, so the step
    can be captured in a CUDA graph.
    """
    block_size = cache.shape[2]
    slots = slot_mapping.clamp_min(0)
    cache[slots // block_size, :, slots % block_size] = x
