"""A layer's routed experts as one compiled call, over a table of pointers to their tensors, which it keeps alive.

It reads only the experts that are hit. Their numbers are not checked.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields

import torch

from tandem.architecture.feed_forward import Activation, Clamp
from tandem.compute.native.codes import ACTIVATION_CODES, CLAMPED_CODE, DTYPE_CODES
from tandem.compute.ops import ExpertWeights, PackedWeight

EXPERTS_FIELDS = "2q2d14q"

_MATRICES = ("gate", "up", "down")
_TENSORS = tuple(field.name for field in fields(ExpertWeights))


def _serves(experts: Sequence[ExpertWeights]) -> bool:
    """Whether the compiled call computes such experts: alike, on the CPU, all packed or none."""
    if not experts:
        return False
    matrices = [getattr(expert, name) for expert in experts for name in _MATRICES]
    tensors = [tensor for expert in experts for tensor in _tensors(expert) if tensor is not None]
    gate, up, down = (_plain(matrix) for matrix in matrices[:3])
    return (
        gate.dtype in DTYPE_CODES
        and len({_shapes(expert) for expert in experts}) == 1
        and gate.shape == up.shape == down.shape[::-1]
        and len({isinstance(matrix, PackedWeight) for matrix in matrices}) == 1
        and all(x.device.type == "cpu" and x.dtype == gate.dtype and x.is_contiguous() for x in tensors)
    )


class NativeExperts:
    """Args:
    call: the compiled function.
    activation, clamp: as in a `GatedSpec`.
    experts: what `_serves` has said yes to.
    """

    def __init__(
        self, call: Callable[..., None], activation: Activation, clamp: Clamp | None, experts: Sequence[ExpertWeights]
    ) -> None:
        first = experts[0]
        self._call = call
        self._experts = tuple(experts)
        self._table = torch.tensor([_pointers(expert) for expert in experts], dtype=torch.int64)  # [num_experts, 6]
        self.dtype = first.gate.dtype
        self._ffn, self._hidden = first.gate.shape
        self._is_packed = isinstance(first.gate, PackedWeight)
        self._activation = (
            (ACTIVATION_CODES[activation], 0.0, 0.0) if clamp is None else (CLAMPED_CODE, clamp.alpha, clamp.limit)
        )

    @classmethod
    def build(
        cls, call: Callable[..., None], activation: Activation, clamp: Clamp | None, experts: Sequence[ExpertWeights]
    ) -> "NativeExperts | None":
        """None = the compiled function does not compute such experts."""
        return cls(call, activation, clamp, experts) if _serves(experts) else None

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, *, out_dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """See `tandem.compute.ops.Experts`."""
        num_tokens, top_k = chosen.shape
        out = torch.empty(num_tokens, self._hidden, dtype=out_dtype)
        assert x.shape == out.shape
        assert x.dtype == self.dtype
        assert x.stride(1) == 1
        assert out_dtype in (x.dtype, torch.float32)
        assert weights.shape == chosen.shape
        assert weights.dtype == torch.float32
        assert chosen.dtype == torch.int64
        assert weights.is_contiguous()
        assert chosen.is_contiguous()
        pointers = x.data_ptr(), x.stride(0), weights.data_ptr(), chosen.data_ptr(), out.data_ptr()
        self._call(*self.fields(*pointers, DTYPE_CODES[out_dtype], num_tokens, top_k, torch.get_num_threads()))
        return out

    def fields(
        self,
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
        """In the order of the C++ struct; without arguments, what is the same for every call."""
        return (
            DTYPE_CODES[self.dtype],
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
            self._is_packed,
            threads,
        )


def _plain(weight: torch.Tensor) -> torch.Tensor:
    """NOTE: the guard of a packed weight costs ten microseconds a question, and there are tens of thousands."""
    return weight.packed if isinstance(weight, PackedWeight) else weight


def _tensors(expert: ExpertWeights) -> Iterator[torch.Tensor | None]:
    """In the order of the C++ struct."""
    for name in _TENSORS:
        tensor = getattr(expert, name)
        yield None if tensor is None else _plain(tensor)


def _shapes(expert: ExpertWeights) -> tuple[tuple[int, ...] | None, ...]:
    return tuple(None if tensor is None else tuple(tensor.shape) for tensor in _tensors(expert))


def _pointers(expert: ExpertWeights) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() for tensor in _tensors(expert)]
