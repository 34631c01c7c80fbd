"""Products with weights as codes.

A matrix that is not packed is multiplied, too: its strips are then made anew at each call, with the same bits.
"""

import ctypes

import torch

from tandem.compute.codes import CodedMatrix
from tandem.compute.native.arguments import bind, has_contiguous_rows
from tandem.compute.native.codes import DTYPE_CODES
from tandem.compute.native.coded_matrix import reference_to, serves
from tandem.compute.native.packing import NativePacking

CODED_LINEAR_FIELDS = "10q"


class NativeCodedProducts(NativePacking):
    """The methods of `Kernels` that multiply by codes. Stateless."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        self._coded_linear = bind(library, "tandem_coded_linear", CODED_LINEAR_FIELDS)

    def coded_linear(
        self,
        x: torch.Tensor,
        matrix: CodedMatrix,
        bias: torch.Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        m, k = x.shape
        n, inputs = matrix.shape
        out = torch.empty(m, n, dtype=x.dtype if out_dtype is None else out_dtype)
        reference = reference_to(matrix)  # NOTE: its memory is to outlive the call
        assert serves(matrix)
        assert inputs == k
        assert has_contiguous_rows(x)
        assert out.dtype in (x.dtype, torch.float32)
        assert bias is None or (bias.dtype == x.dtype and bias.shape == (n,) and bias.is_contiguous())
        self._coded_linear(
            DTYPE_CODES[x.dtype],
            DTYPE_CODES[out.dtype],
            x.data_ptr(),
            x.stride(0),
            ctypes.addressof(reference),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            n,
            m,
            torch.get_num_threads(),
        )
        return out
