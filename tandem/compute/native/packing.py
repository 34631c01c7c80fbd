"""Packing of weights into the order in which the compiled kernels read them: strips of 16 outputs."""

import ctypes
from dataclasses import replace

import torch

from tandem.compute.codes import CodedMatrix, CodeKind
from tandem.compute.native.calls import bind
from tandem.compute.native.coded_matrix import STEP, reference_to, serves
from tandem.compute.native.codes import DTYPE_CODES
from tandem.compute.order import Order

# Fields of the compiled functions' argument structs, in order, see `calls.struct_of`.
PACK_FIELDS = "dtype weight out n k threads ok"
PACK_CODED_FIELDS = "weights packed threads"
STRIP = 16  # outputs


class NativePacking:
    """The methods of `Kernels` (`compute.ops`) that pack weights. Stateless."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._pack = bind(library, "tandem_pack", PACK_FIELDS)
        self._pack_coded = bind(library, "tandem_pack_coded", PACK_CODED_FIELDS)

    def can_pack(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        return len(shape) == 2 and dtype in DTYPE_CODES and self._packed(shape, dtype, 0, 0)

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        assert weight.is_contiguous()
        out = torch.empty_like(weight)
        is_packed = self._packed(tuple(weight.shape), weight.dtype, weight.data_ptr(), out.data_ptr())
        assert is_packed
        return out

    def _packed(self, shape: tuple[int, ...], dtype: torch.dtype, weight: int, out: int) -> bool:
        is_packed = ctypes.c_int64()
        where = ctypes.addressof(is_packed)
        self._pack(DTYPE_CODES[dtype], weight, out, *shape, torch.get_num_threads(), where)
        return bool(is_packed.value)

    def can_pack_coded(self, matrix: CodedMatrix) -> bool:
        return matrix.order is Order.ROWS and serves(matrix)

    def pack_coded(self, matrix: CodedMatrix) -> CodedMatrix:
        outputs, inputs = matrix.shape
        assert matrix.order is Order.ROWS
        assert serves(matrix)
        strips, steps = -(-outputs // STRIP), -(-inputs // STEP)
        code_bytes = STRIP * STEP // (2 if matrix.kind is CodeKind.TABLE4 else 1)
        scales_shape, supers_shape = (strips, matrix.num_groups, STRIP), (strips, matrix.num_supers, STRIP)
        packed = replace(
            matrix,
            codes=matrix.codes.new_empty(strips, steps * code_bytes),
            scales=matrix.scales.new_empty(scales_shape),
            offsets=_empty(matrix.offsets, scales_shape),
            super_scales=_empty(matrix.super_scales, supers_shape),
            super_offsets=_empty(matrix.super_offsets, supers_shape),
            order=Order.STRIPS,
        )
        if matrix.codes.device.type != "meta":
            references = reference_to(matrix), reference_to(packed)  # NOTE: their memory is to outlive the call
            self._pack_coded(*map(ctypes.addressof, references), torch.get_num_threads())
        return packed


def _empty(of: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor | None:
    return None if of is None else of.new_empty(shape)
