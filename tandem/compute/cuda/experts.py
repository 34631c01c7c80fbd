"""Routed experts of a layer as three Triton kernels, without waiting for the device.

Pairs of token and expert are sorted by expert; a tile of pairs is multiplied by the tensors of its expert, which the
kernels read by address. So only chosen experts are read, and the sizes of launches depend on shapes alone.
"""

import importlib
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from tandem.architecture.feed_forward import Activation, Clamp
from tandem.compute.codes import CodedMatrix
from tandem.compute.cuda.coded import (
    COMBINE_TILE,
    FEW_TOKENS,
    MANY_TOKENS,
    TILE_OUTPUTS,
    CodedProducts,
    product_options,
)
from tandem.compute.cuda.halves import FLOATS, SPLIT, refusal, sum_span_of
from tandem.compute.ops import ExpertWeights, Matrix, Numbers
from tandem.compute.order import Order

KERNELS = "tandem.compute.cuda.triton_experts"  # imported when first used, since it needs triton
FLOAT_SPAN = 64  # inputs of a matrix product
_ALIGNMENT = 16  # bytes, of what is read in one piece
_MATRICES = ("gate", "up", "down")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TritonExperts:
    """Implements `Experts` with Triton kernels.

    Args:
        products: multiplies by single quantised matrices; packs them.
        activation, clamp: as in a `GatedSpec`.
        experts: experts for which `experts_refusal` is None; they are kept alive, since kernels read them by address.
    """

    def __init__(
        self,
        products: CodedProducts,
        activation: Activation,
        clamp: Clamp | None,
        experts: Sequence[ExpertWeights],
    ) -> None:
        self._products = products
        self._experts = [_packed(products, expert) for expert in experts]
        first = self._experts[0]
        device = _tensors(first.gate)[0].device
        rows = [[_addresses(expert, name) for name in _MATRICES] for expert in self._experts]
        self._addresses = torch.tensor(rows, dtype=torch.int64).to(device)  # [num_experts, matrices, parts]
        factors = [[_factor(getattr(expert, name)) for name in _MATRICES] for expert in self._experts]
        self._factors = torch.tensor(factors, dtype=torch.float32).to(device)
        self._first = first
        self._activation = {
            "IS_GELU": activation == "gelu_tanh",
            "IS_CLAMPED": clamp is not None,
            "alpha": 0.0 if clamp is None else clamp.alpha,
            "limit": 0.0 if clamp is None else clamp.limit,
            "shift": 0.0 if clamp is None else clamp.shift,
        }

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, *, out_dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """See `tandem.compute.ops.Experts`."""
        assert isinstance(self._first.gate, CodedMatrix) or self._first.gate.tensor.dtype == x.dtype
        (num_tokens, top_k), hidden = chosen.shape, x.shape[1]
        assert x.shape == (num_tokens, hidden) == (num_tokens, _shape(self._first.gate)[1])
        out = torch.empty(num_tokens, hidden, dtype=out_dtype, device=x.device)
        if not out.numel():
            return out
        experts, order = chosen.flatten().sort(stable=True)
        starts = torch.searchsorted(experts, torch.arange(len(self._experts) + 1, device=x.device))
        inner = torch.empty(len(order), _shape(self._first.gate)[0], dtype=x.dtype, device=x.device)
        self._multiply(inner, x, order, starts, top_k, is_gated=True)
        outputs = torch.empty(len(order), hidden, dtype=torch.float32, device=x.device)
        self._multiply(outputs, inner, order, starts, top_k, is_gated=False)
        places = order.argsort().view(num_tokens, top_k).sort(dim=1).values
        self._kernels.weighted_sum_kernel[(num_tokens, -(-hidden // COMBINE_TILE))](
            out, outputs, weights.contiguous(), order, places, hidden, TOP_K=top_k, TILE=COMBINE_TILE
        )
        return out

    @property
    def _kernels(self) -> ModuleType:
        return importlib.import_module(KERNELS)

    def _multiply(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        order: torch.Tensor,
        starts: torch.Tensor,
        top_k: int,
        *,
        is_gated: bool,
    ) -> None:
        """Computes `out` [num_pairs, outputs]: by gate and up from rows of tokens, or by down from rows of pairs."""
        num_experts, num_pairs = len(self._experts), len(order)
        matrix, bias = (
            (self._first.gate, self._first.gate_bias) if is_gated else (self._first.down, self._first.down_bias)
        )
        assert x.stride(1) == 1, x.stride()
        sums = x
        if isinstance(matrix, CodedMatrix) and matrix.offsets is not None:
            sums = self._products.sums(x, sum_span_of(matrix))
        pairs = FEW_TOKENS if num_pairs <= FEW_TOKENS * num_experts else MANY_TOKENS
        num_tiles = num_pairs // pairs + min(num_experts, num_pairs)
        outputs, inputs = _shape(matrix)
        self._kernels.experts_kernel[(-(-outputs // TILE_OUTPUTS), num_tiles)](
            out,
            x,
            sums,
            order,
            starts,
            self._addresses,
            self._factors,
            **self._matrix_arguments(matrix),
            bias=x if bias is None else bias,
            num_experts=num_experts,
            num_outputs=outputs,
            inputs=inputs,
            x_stride=x.stride(0),
            num_spans=sums.shape[1],
            TOP_K=top_k,
            HAS_BIAS=bias is not None,
            IS_GATED=is_gated,
            **self._activation,
            TILE_E=1 << (num_experts - 1).bit_length(),
            TILE_N=TILE_OUTPUTS,
            TILE_T=pairs,
            **product_options(x.dtype),
        )

    def _matrix_arguments(self, matrix: Numbers) -> dict[str, Any]:
        """Arguments for the first expert's matrix; those of the others differ in addresses and factor only."""
        if isinstance(matrix, CodedMatrix):
            found = self._products.matrix_arguments(matrix)
            del found["factor"]
            return found
        floats = matrix.tensor
        names = ("codes", "scales", "super_scales", "offsets", "super_offsets", "table")
        constants = {"GROUP": 0, "SUPER": 0, "SPAN": FLOAT_SPAN, "SPLIT": SPLIT, "FORM": FLOATS, "ADDED": 0}
        none = {"SCALE_FORM": 0, "OFFSET_FORM": 0, "HAS_OFFSETS": False}
        return {**dict.fromkeys(names, floats), "width": floats.shape[1], **constants, **none}


def experts_refusal(experts: Sequence[ExpertWeights]) -> str | None:
    """Reason why the kernels cannot compute such experts; None = they can."""
    if not experts:
        return "there are no experts"
    alike: set[object] = set()
    for expert in experts:
        gate, up, down = (_kind(getattr(expert, name)) for name in _MATRICES)
        if gate != up:
            return "gate and up of an expert are not alike"
        biases = tuple(
            None if bias is None else (bias.dtype, *bias.shape)
            for bias in (expert.gate_bias, expert.up_bias, expert.down_bias)
        )
        if biases[0] != biases[1]:
            return "gate and up of an expert have different biases"
        alike.add((gate, down, biases))
        for name in _MATRICES:
            if (reason := _refusal(getattr(expert, name))) is not None:
                return reason
    first = experts[0]
    if _shape(first.gate) != _shape(first.down)[::-1]:
        return f"gate of shape {_shape(first.gate)} does not fit down of {_shape(first.down)}"
    return None if len(alike) == 1 else "experts are not alike"


def _refusal(matrix: Numbers) -> str | None:
    if isinstance(matrix, Matrix):
        if matrix.tensor.dtype not in _DTYPES:
            return f"experts of {matrix.tensor.dtype}"
    elif matrix.permutation is not None:
        return "each expert has inputs in an order of its own"
    elif (reason := refusal(matrix)) is not None:
        return reason
    is_readable = all(each.is_contiguous() and each.data_ptr() % _ALIGNMENT == 0 for each in _tensors(matrix))
    return None if is_readable else f"an expert's tensors do not begin at {_ALIGNMENT} bytes each"


def _kind(matrix: Numbers) -> tuple[object, ...]:
    """Properties of a matrix that select a compiled kernel or its arguments."""
    tensors = tuple((name, each.dtype, *each.shape) for name, each in _named(matrix))
    if isinstance(matrix, Matrix):
        return tensors
    table: object = matrix.table
    if matrix.table is not None:  # NOTE: packed matrices share theirs, which need not be copied from the device
        table = id(matrix.table) if matrix.order is Order.STRIPS else tuple(matrix.table.tolist())
    return (matrix.kind, matrix.group_size, matrix.super_size, matrix.order, table, *tensors)


def _packed(products: CodedProducts, expert: ExpertWeights) -> ExpertWeights:
    changed: dict[str, Any] = {}
    for name in _MATRICES:
        matrix = getattr(expert, name)
        if isinstance(matrix, CodedMatrix) and matrix.order is Order.ROWS:
            changed[name] = products.pack(matrix)
    return replace(expert, **changed)


def _addresses(expert: ExpertWeights, name: str) -> list[int]:
    matrix, bias = getattr(expert, name), getattr(expert, f"{name}_bias")
    if isinstance(matrix, Matrix):
        found = [matrix.tensor, None, None, None, None, bias]
    else:
        found = [
            *(matrix.codes, matrix.scales, matrix.super_scales, matrix.offsets, matrix.super_offsets),
            bias,
        ]
    return [0 if each is None else each.data_ptr() for each in found]


def _factor(matrix: Numbers) -> float:
    return matrix.factor if isinstance(matrix, CodedMatrix) else 1.0


def _named(matrix: Numbers) -> list[tuple[str, torch.Tensor]]:
    return [("floats", matrix.tensor)] if isinstance(matrix, Matrix) else list(matrix.tensors())


def _tensors(matrix: Numbers) -> list[torch.Tensor]:
    return [each for _, each in _named(matrix)]


def _shape(matrix: Numbers) -> tuple[int, int]:
    outputs, inputs = matrix.tensor.shape if isinstance(matrix, Matrix) else matrix.shape
    return outputs, inputs
