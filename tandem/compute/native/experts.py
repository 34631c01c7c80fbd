"""Routed experts of a layer as one compiled call, over a table of pointers to their tensors, which it keeps alive.

Only chosen experts are read. Expert indices are not checked.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import fields

import torch

from tandem.architecture.feed_forward import Activation, Clamp
from tandem.compute.codes import CodedMatrix
from tandem.compute.native.coded_matrix import are_alike, reference_to
from tandem.compute.native.coded_matrix import serves as serves_codes
from tandem.compute.native.codes import ACTIVATION_CODES, CLAMPED_CODE, DTYPE_CODES
from tandem.compute.ops import ExpertWeights, Matrix, Numbers, floats_of
from tandem.compute.order import Order

EXPERTS_FIELDS = """
    dtype activation alpha:d limit:d shift:d experts num_experts x x_stride weights chosen out out_dtype num_tokens
    top_k hidden ffn down_blocks is_packed is_coded threads
"""

_Part = Numbers | torch.Tensor
_MATRICES = ("gate", "up", "down")
_PARTS = tuple(field.name for field in fields(ExpertWeights))


def _serves(experts: Sequence[ExpertWeights]) -> bool:
    """Whether the compiled function supports the experts: on the CPU, alike, all floats in one order or quantised."""
    if not experts:
        return False
    first, floats = experts[0], [x for expert in experts for x in floats_of(expert, _PARTS)]
    matrices: list[Numbers] = [getattr(expert, name) for expert in experts for name in _MATRICES]
    return (
        len({_shapes(expert) for expert in experts}) == 1
        and _shape(first.gate) == _shape(first.up) == _shape(first.down)[::-1]
        and len({matrix.order if isinstance(matrix, Matrix) else None for matrix in matrices}) == 1
        and (isinstance(first.gate, Matrix) or _serves_codes(experts))
        and all(x.device.type == "cpu" and x.dtype in DTYPE_CODES and x.is_contiguous() for x in floats)
        and len({x.dtype for x in floats}) <= 1
    )


def _serves_codes(experts: Sequence[ExpertWeights]) -> bool:
    """NOTE: each expert may have its own permutation, and its own table unless rows are rounded."""
    layouts, devices = set(), set()
    for expert in experts:
        gate, up, down = expert.gate, expert.up, expert.down
        assert isinstance(gate, CodedMatrix)
        assert isinstance(up, CodedMatrix)
        assert isinstance(down, CodedMatrix)
        if not (serves_codes(gate) and serves_codes(down) and are_alike(gate, up)):
            return False
        layouts.add(tuple(_layout(x) for x in (gate, down)))
        devices |= {x.codes.device.type for x in (gate, up, down)}
    return len(layouts) == 1 and devices == {"cpu"}


def _layout(matrix: CodedMatrix) -> tuple[object, ...]:
    """Properties that must be equal for all experts, so that one pass over the rows serves them."""
    numbers = matrix.table if matrix.rounds_rows else None
    table = None if numbers is None else tuple(numbers.tolist())
    return matrix.kind, matrix.group_size, matrix.offsets is None, matrix.rounds_rows, table


class NativeExperts:
    """Implements `Experts` with the compiled function.

    Args:
        call: the compiled function.
        activation, clamp: as in a `GatedSpec`.
        experts: experts for which `_serves` is true.
    """

    def __init__(
        self, call: Callable[..., None], activation: Activation, clamp: Clamp | None, experts: Sequence[ExpertWeights]
    ) -> None:
        first = experts[0]
        self._call = call
        self._experts = tuple(experts)
        self._references: list[ctypes.Array[ctypes.c_char]] = []
        self._table = torch.tensor(
            [self._pointers(expert) for expert in experts], dtype=torch.int64
        )  # [num_experts, 6]
        self.dtype = next((x.dtype for x in floats_of(first, _PARTS)), None)
        """Dtype of the rows that they multiply; None = any."""
        self._ffn, self._hidden = _shape(first.gate)
        self._down_blocks = first.down.sum_blocks if isinstance(first.down, Matrix) else 1
        self._is_coded = isinstance(first.gate, CodedMatrix)
        self._order = first.gate.order if isinstance(first.gate, Matrix) else Order.ROWS
        self._activation = (
            (ACTIVATION_CODES[activation], 0.0, 0.0, 0.0)
            if clamp is None
            else (CLAMPED_CODE, clamp.alpha, clamp.limit, clamp.shift)
        )

    @classmethod
    def build(
        cls, call: Callable[..., None], activation: Activation, clamp: Clamp | None, experts: Sequence[ExpertWeights]
    ) -> "NativeExperts | None":
        """The experts as one call; None = the compiled function does not support them."""
        return cls(call, activation, clamp, experts) if _serves(experts) else None

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, *, out_dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """See `tandem.compute.ops.Experts`."""
        num_tokens, top_k = chosen.shape
        out = torch.empty(num_tokens, self._hidden, dtype=out_dtype)
        assert x.shape == out.shape
        assert x.dtype in DTYPE_CODES
        assert self.dtype in (None, x.dtype)
        assert x.stride(1) == 1
        assert out_dtype in (x.dtype, torch.float32)
        assert weights.shape == chosen.shape
        assert weights.dtype == torch.float32
        assert chosen.dtype == torch.int64
        assert weights.is_contiguous()
        assert chosen.is_contiguous()
        pointers = x.data_ptr(), x.stride(0), weights.data_ptr(), chosen.data_ptr(), out.data_ptr()
        dtypes = DTYPE_CODES[x.dtype], DTYPE_CODES[out_dtype]
        self._call(*self.fields(dtypes[0], *pointers, dtypes[1], num_tokens, top_k, torch.get_num_threads()))
        return out

    def fields(
        self,
        dtype: int = 0,
        x: int = 0,
        x_stride: int = 0,
        weights: int = 0,
        chosen: int = 0,
        out: int = 0,
        out_dtype: int = 0,
        num_tokens: int = 0,
        top_k: int = 0,
        threads: int = 0,
    ) -> tuple[int | float, ...]:
        """Fields of the C++ struct, in order; with default arguments, those that are equal for all calls."""
        return (
            dtype,
            *self._activation,
            self._table.data_ptr(),
            len(self._experts),
            x,
            x_stride,
            weights,
            chosen,
            out,
            out_dtype,
            num_tokens,
            top_k,
            self._hidden,
            self._ffn,
            self._down_blocks,
            self._order,
            self._is_coded,
            threads,
        )

    def _pointers(self, expert: ExpertWeights) -> list[int]:
        return [self._pointer(getattr(expert, name)) for name in _PARTS]

    def _pointer(self, part: _Part | None) -> int:
        if part is None:
            return 0
        if not isinstance(part, CodedMatrix):
            return (part.tensor if isinstance(part, Matrix) else part).data_ptr()
        self._references.append(reference_to(part))
        return ctypes.addressof(self._references[-1])


def _shape(part: _Part) -> tuple[int, ...]:
    return tuple(part.tensor.shape if isinstance(part, Matrix) else part.shape)


def _shapes(expert: ExpertWeights) -> tuple[tuple[int, ...] | None, ...]:
    parts: list[_Part | None] = [getattr(expert, name) for name in _PARTS]
    return tuple(None if part is None else _shape(part) for part in parts)
