"""`Kernels` on an NVIDIA GPU: PyTorch's products of floats, and Tandem's Triton kernels for the rest.

Quantised weights stay codes in the GPU's memory and are decoded in registers. A row's bits do not depend on the other
rows of a product with codes, a norm or a rotation; PyTorch's products do not promise that. Products ran on an H200
(decision 116).
"""

import importlib.util
import logging
from collections.abc import Sequence

import torch

from tandem.architecture.feed_forward import Activation, Clamp
from tandem.compute.codes import CodedMatrix
from tandem.compute.cuda import rows
from tandem.compute.cuda.coded import CodedProducts
from tandem.compute.cuda.experts import TritonExperts, experts_refusal
from tandem.compute.cuda.halves import refusal, unpacked_rows
from tandem.compute.ops import Experts, ExpertWeights
from tandem.compute.order import Order
from tandem.compute.torch.kernels import TorchKernels

MIN_CAPABILITY = (8, 0)  # compute capability of the GPU
_log = logging.getLogger(__name__)


class TritonKernels(TorchKernels):
    """Implements `Kernels` with Triton. A quantised matrix that they refuse is decoded before each product, and named
    in the log once.
    """

    name = "triton"

    def __init__(self) -> None:
        self._products = CodedProducts()
        self._logged: set[str] = set()

    @staticmethod
    def missing(device: torch.device) -> str | None:
        """Reason why the kernels cannot run on the device; None = they can."""
        if device.type != "cuda":
            return f"device {device} is not CUDA"
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed; it comes with PyTorch's CUDA builds"
        capability = torch.cuda.get_device_capability(device)
        return None if capability >= MIN_CAPABILITY else f"compute capability {capability} is below {MIN_CAPABILITY}"

    def can_pack_coded(self, matrix: CodedMatrix) -> bool:
        return self._serves(matrix)

    def pack_coded(self, matrix: CodedMatrix) -> CodedMatrix:
        return self._products.pack(matrix)

    def coded_rows(self, matrix: CodedMatrix, indices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if matrix.order is Order.ROWS:
            return super().coded_rows(matrix, indices, dtype)
        return unpacked_rows(matrix, indices).decode(dtype)

    def coded_linear(
        self,
        x: torch.Tensor,
        matrix: CodedMatrix,
        bias: torch.Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        if not self._serves(matrix):
            return super().coded_linear(x, matrix, bias, out_dtype=out_dtype)
        return self._products.linear(x, matrix, bias, out_dtype)

    def coded_gated_linear(
        self,
        x: torch.Tensor,
        gate: CodedMatrix,
        up: CodedMatrix,
        activation: Activation,
        gate_bias: torch.Tensor | None = None,
        up_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not (self._serves(gate) and self._serves(up)):
            return super().coded_gated_linear(x, gate, up, activation, gate_bias, up_bias)
        return self._products.gated_linear(x, gate, up, activation, gate_bias, up_bias)

    def gated_product(self, gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
        product = rows.gated_product(gate, up, activation)
        return super().gated_product(gate, up, activation) if product is None else product

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        residual: torch.Tensor | None = None,
        unit_offset: bool = False,
    ) -> torch.Tensor:
        normed = rows.rms_norm(x, weight, eps, residual, unit_offset)
        if normed is None:
            return super().rms_norm(x, weight, eps, residual=residual, unit_offset=unit_offset)
        return normed

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
        kv = (k, v, slot_mapping, k_cache, v_cache)
        norms = {"q_norm": q_norm, "k_norm": k_norm}
        if not rows.rope(q, kv, cos, sin, positions, **norms, norm_eps=norm_eps, unit_offset=unit_offset):
            super().rope_and_write(
                q, k, v, cos, sin, positions, slot_mapping, k_cache, v_cache,
                **norms, norm_eps=norm_eps, unit_offset=unit_offset,
            )  # fmt: skip

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
        if not rows.rope(
            q, None, cos, sin, positions, q_norm=norm, k_norm=None, norm_eps=norm_eps, unit_offset=unit_offset
        ):
            super().rotate(q, cos, sin, positions, norm=norm, norm_eps=norm_eps, unit_offset=unit_offset)

    def experts(self, activation: Activation, clamp: Clamp | None, experts: Sequence[ExpertWeights]) -> Experts | None:
        if (reason := experts_refusal(experts)) is None:
            return TritonExperts(self._products, activation, clamp, experts)
        self._log_once(f"experts are multiplied one by one, answers take longer: {reason}")
        return None

    def _serves(self, matrix: CodedMatrix) -> bool:
        if (reason := refusal(matrix)) is None:
            return True
        self._log_once(f"codes are decoded before each product, answers take longer: {reason}")
        return False

    def _log_once(self, message: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            _log.warning("%s", message)
