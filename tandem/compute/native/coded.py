"""Products with quantised matrices, by the compiled kernels.

A matrix that is not packed is packed anew at each call, with the same bits as result.
"""

import ctypes

import torch

from tandem.architecture.feed_forward import Activation
from tandem.compute.codes import CodedMatrix
from tandem.compute.native.arguments import has_contiguous_rows
from tandem.compute.native.calls import bind
from tandem.compute.native.coded_matrix import are_alike, reference_to, serves
from tandem.compute.native.codes import ACTIVATION_CODES, DTYPE_CODES
from tandem.compute.native.packing import NativePacking

# Fields of the compiled functions' argument structs, in order, see `calls.struct_of`.
CODED_LINEAR_FIELDS = "dtype out_dtype x x_stride weights bias out out_stride m threads"
CODED_GATED_FIELDS = "dtype activation x x_stride gate up gate_bias up_bias out out_stride m threads"
CODED_ROWS_FIELDS = "dtype weights indices out n threads"


class NativeCodedProducts(NativePacking):
    """The methods of `Kernels` (`compute.ops`) that decode rows of quantised matrices or multiply by these.
    Stateless.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        self._coded_linear = bind(library, "tandem_coded_linear", CODED_LINEAR_FIELDS)
        self._coded_rows = bind(library, "tandem_coded_rows", CODED_ROWS_FIELDS)
        self._coded_gated_linear = bind(library, "tandem_coded_gated_linear", CODED_GATED_FIELDS)

    def coded_rows(self, matrix: CodedMatrix, indices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(len(indices), matrix.shape[1], dtype=dtype)
        reference = reference_to(matrix)  # NOTE: its memory is to outlive the call
        assert serves(matrix)
        assert indices.dtype == torch.int64
        assert indices.is_contiguous()
        pointers = ctypes.addressof(reference), indices.data_ptr(), out.data_ptr()
        self._coded_rows(DTYPE_CODES[dtype], *pointers, len(indices), torch.get_num_threads())
        return out

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
        assert _is_bias(bias, n, x.dtype)
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

    def coded_gated_linear(
        self,
        x: torch.Tensor,
        gate: CodedMatrix,
        up: CodedMatrix,
        activation: Activation,
        gate_bias: torch.Tensor | None = None,
        up_bias: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        if not are_alike(gate, up):
            return None
        m, k = x.shape
        n = gate.shape[0]
        out = x.new_empty(m, n)
        references = reference_to(gate), reference_to(up)  # NOTE: their memory is to outlive the call
        assert serves(gate)
        assert gate.shape == up.shape == (n, k)
        assert has_contiguous_rows(x)
        assert _is_bias(gate_bias, n, x.dtype)
        assert _is_bias(up_bias, n, x.dtype)
        self._coded_gated_linear(
            DTYPE_CODES[x.dtype],
            ACTIVATION_CODES[activation],
            x.data_ptr(),
            x.stride(0),
            *map(ctypes.addressof, references),
            0 if gate_bias is None else gate_bias.data_ptr(),
            0 if up_bias is None else up_bias.data_ptr(),
            out.data_ptr(),
            n,
            m,
            torch.get_num_threads(),
        )
        return out


def _is_bias(bias: torch.Tensor | None, size: int, dtype: torch.dtype) -> bool:
    return bias is None or (bias.dtype == dtype and bias.shape == (size,) and bias.is_contiguous())
