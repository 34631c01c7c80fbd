"""Quantised matrices as arguments of the compiled kernels: their struct, and which of them are supported."""

import ctypes

import torch

from tandem.compute.codes import SUM_BLOCK, CodedMatrix
from tandem.compute.native.calls import struct_of
from tandem.compute.native.codes import SCALE_DTYPE_CODES

CODED_FIELDS = """
    kind n k group_size scale_dtype offset_dtype is_packed super_size rounds_rows factor:d codes scales offsets
    super_scales super_offsets table permutation
"""
STEP = 8  # inputs whose codes lie together
_pack = struct_of(CODED_FIELDS).pack


def serves(matrix: CodedMatrix) -> bool:
    """Whether the compiled products support the matrix: a block of the sum (`SUM_BLOCK` inputs) has whole groups, of a
    multiple of 8 inputs, or lies within one.
    """
    group, (outputs, inputs) = matrix.group_size, matrix.shape
    is_whole_row = group >= inputs
    return min(outputs, inputs) > 0 and (
        is_whole_row or group % SUM_BLOCK == 0 or (SUM_BLOCK % group == 0 and group % STEP == 0)
    )


def are_alike(first: CodedMatrix, second: CodedMatrix) -> bool:
    """Whether two matrices can be multiplied in one pass over the rows: with equal decoding, group size and order."""
    return (
        (first.kind, first.shape[1], first.group_size) == (second.kind, second.shape[1], second.group_size)
        and (first.offsets is None) == (second.offsets is None)
        and first.order is second.order
        and first.rounds_rows == second.rounds_rows
        and _are_equal(first.table, second.table)
        and _are_equal(first.permutation, second.permutation)
    )


def _are_equal(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return first is second or torch.equal(first, second)


def reference_to(matrix: CodedMatrix) -> ctypes.Array[ctypes.c_char]:
    """The C++ struct of the matrix. It has pointers to the matrix's tensors but does not keep them alive."""
    tensors = (
        *(matrix.codes, matrix.scales, matrix.offsets, matrix.super_scales, matrix.super_offsets),
        *(matrix.table, matrix.permutation),
    )
    assert all(x is None or (x.device.type == "cpu" and x.is_contiguous()) for x in tensors)
    assert matrix.permutation is None or matrix.permutation.dtype == torch.int64
    packed = _pack(
        matrix.kind,
        *matrix.shape,
        matrix.group_size,
        SCALE_DTYPE_CODES[matrix.scales.dtype],
        0 if matrix.offsets is None else SCALE_DTYPE_CODES[matrix.offsets.dtype],
        matrix.order,
        matrix.super_size,
        matrix.rounds_rows,
        matrix.factor,
        *(0 if x is None else x.data_ptr() for x in tensors),
    )
    return ctypes.create_string_buffer(packed, len(packed))
