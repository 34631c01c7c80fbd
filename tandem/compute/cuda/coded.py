"""Launches the Triton kernels for products with quantised matrices.

A sum over inputs is always cut into the same splits (`halves.SPLIT` inputs), which are added in order, so its bits
depend on the matrix and the row alone. The number of tokens only decides tile sizes, and whether one program computes
all splits of an output or a program each.
"""

import importlib
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from tandem.architecture.feed_forward import Activation
from tandem.compute.codes import CodedMatrix
from tandem.compute.cuda.halves import SPLIT, Tables, halved, refusal, span_of, sum_span_of, value_form
from tandem.compute.order import Order

KERNELS = "tandem.compute.cuda.triton_coded"  # imported when first used, since it needs triton
TILE_OUTPUTS = 64  # outputs of a tile, which one program computes
FEW_TOKENS, MANY_TOKENS = 16, 64  # sizes of a tile, for few and for many tokens
MOST_SPLIT_TOKENS = 64  # above it one program computes all splits, since their partial sums would take too much memory
SUM_TILE, COMBINE_TILE = 8, 256  # sums, and outputs, that one program computes
LAUNCH_OPTIONS = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True}


class CodedProducts:
    """The methods of the CUDA `Kernels` that multiply by quantised matrices, for matrices of which
    `cuda.halves.refusal` returns None; codes of others are decoded before each product (`cuda.kernels`).

    A matrix that is not packed is packed anew at each call, with the same bits as result.
    """

    def __init__(self) -> None:
        self.tables = Tables()

    def pack(self, matrix: CodedMatrix) -> CodedMatrix:
        """The matrix in the order in which the kernels read it: 4-bit codes of two halves of inputs in a byte."""
        packed = halved(matrix)
        return packed if packed.table is None else replace(packed, table=self.tables.shared(packed.table))

    def linear(
        self, x: torch.Tensor, matrix: CodedMatrix, bias: torch.Tensor | None, out_dtype: torch.dtype | None
    ) -> torch.Tensor:
        """Rows times the matrix transposed, plus bias, see `Kernels.coded_linear`."""
        out = torch.empty(x.shape[0], matrix.shape[0], dtype=out_dtype or x.dtype, device=x.device)
        if out.numel():
            partials = self._product(x, matrix, out, bias)
            if partials is not None:
                self._kernels.combine_kernel[_combine_grid(out)](
                    out, partials, out if bias is None else bias, *out.shape, len(partials), HAS_BIAS=bias is not None,
                    TILE=COMBINE_TILE,
                )  # fmt: skip
        return out

    def gated_linear(
        self,
        x: torch.Tensor,
        gate: CodedMatrix,
        up: CodedMatrix,
        activation: Activation,
        gate_bias: torch.Tensor | None,
        up_bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """`activation(x @ gate.T) * (x @ up.T)`, see `Kernels.coded_gated_linear`."""
        out = torch.empty(x.shape[0], gate.shape[0], dtype=x.dtype, device=x.device)
        if out.numel():
            self._kernels.gated_combine_kernel[_combine_grid(out)](
                out,
                *(self.splits(x, matrix) for matrix in (gate, up)),
                out if gate_bias is None else gate_bias,
                out if up_bias is None else up_bias,
                *out.shape,
                num_splits_of(x.shape[0], gate.shape[1]),
                HAS_GATE_BIAS=gate_bias is not None,
                HAS_UP_BIAS=up_bias is not None,
                IS_GELU=activation == "gelu_tanh",
                TILE=COMBINE_TILE,
            )
        return out

    def splits(self, x: torch.Tensor, matrix: CodedMatrix) -> torch.Tensor:
        """Partial sums over splits of the inputs, for a caller that adds them in order and does more with each sum,
        [num_splits, num_tokens, out] float32.
        """
        whole = torch.empty(1, x.shape[0], matrix.shape[0], dtype=torch.float32, device=x.device)
        partials = self._product(x, matrix, whole[0], None)
        return whole if partials is None else partials

    @property
    def _kernels(self) -> ModuleType:
        return importlib.import_module(KERNELS)

    def _product(
        self, x: torch.Tensor, matrix: CodedMatrix, out: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Writes `out`, or returns partial sums over splits of the inputs."""
        assert refusal(matrix) is None, refusal(matrix)
        assert x.shape[1] == matrix.shape[1], (x.shape, matrix.shape)
        assert x.device == matrix.codes.device, (x.device, matrix.codes.device)
        packed = self.pack(matrix) if matrix.order is Order.ROWS else matrix
        x = x if packed.permutation is None else x.index_select(1, packed.permutation)
        assert x.stride(1) == 1, x.stride()
        (num_tokens, inputs), num_outputs = x.shape, matrix.shape[0]
        num_splits = -(-inputs // SPLIT)
        is_split = num_splits_of(num_tokens, inputs) > 1
        shape = (num_splits if is_split else 0, num_tokens, num_outputs)
        partials = torch.empty(shape, dtype=torch.float32, device=x.device)
        sums = x if packed.offsets is None else self.sums(x, sum_span_of(packed))
        tokens = FEW_TOKENS if num_tokens <= FEW_TOKENS else MANY_TOKENS
        grid = -(-num_outputs // TILE_OUTPUTS), -(-num_tokens // tokens), num_splits if is_split else 1
        self._kernels.coded_kernel[grid](
            out,
            partials if is_split else out,
            x,
            sums,
            out if bias is None else bias,
            **self.matrix_arguments(packed),
            num_tokens=num_tokens,
            num_outputs=num_outputs,
            inputs=inputs,
            x_stride=x.stride(0),
            num_spans=sums.shape[1],
            num_splits=num_splits,
            HAS_BIAS=bias is not None,
            IS_SPLIT=is_split,
            TILE_N=TILE_OUTPUTS,
            TILE_T=tokens,
            **product_options(x.dtype),
        )
        return partials if is_split else None

    def sums(self, x: torch.Tensor, span: int) -> torch.Tensor:
        """Sums of each `span` consecutive inputs of a row, by which offsets of quantised weights are multiplied,
        [num_tokens, spans] float32.
        """
        num_spans = -(-x.shape[1] // span)
        out = torch.empty(x.shape[0], num_spans, dtype=torch.float32, device=x.device)
        self._kernels.sums_kernel[(x.shape[0], -(-num_spans // SUM_TILE))](
            out, x, x.stride(0), x.shape[1], num_spans, SPAN=span, TILE=SUM_TILE
        )
        return out

    def matrix_arguments(self, matrix: CodedMatrix) -> dict[str, Any]:
        """Arguments of kernels that read the matrix, with placeholders for tensors that it does not have."""
        form, codes = self.tables.form(matrix), matrix.codes.view(torch.uint8)
        group, inputs = matrix.group_size, matrix.shape[1]
        return {
            "codes": codes,
            "scales": _readable(matrix.scales),
            "super_scales": codes if matrix.super_scales is None else matrix.super_scales,
            "offsets": codes if matrix.offsets is None else _readable(matrix.offsets),
            "super_offsets": codes if matrix.super_offsets is None else matrix.super_offsets,
            "table": codes if matrix.table is None else matrix.table,
            "factor": matrix.factor,
            "width": codes.shape[1],
            "GROUP": 0 if group >= inputs else group,
            "SUPER": matrix.super_size,
            "SPAN": span_of(matrix),
            "SPLIT": SPLIT,
            "FORM": form.form,
            "ADDED": form.added,
            "SCALE_FORM": value_form(matrix.scales),
            "OFFSET_FORM": value_form(matrix.offsets),
            "HAS_OFFSETS": matrix.offsets is not None,
        }


def num_splits_of(num_tokens: int, inputs: int) -> int:
    """Number of splits of the inputs, for several partial sums per output if too few tokens would fill the GPU."""
    return -(-inputs // SPLIT) if num_tokens <= MOST_SPLIT_TOKENS else 1


def product_options(dtype: torch.dtype) -> dict[str, Any]:
    """NOTE: float32 products stay float32; the default would round their inputs to TF32."""
    return {"PRECISION": "ieee" if dtype == torch.float32 else "tf32", **LAUNCH_OPTIONS}


def _combine_grid(out: torch.Tensor) -> tuple[int, int]:
    return out.shape[0], -(-out.shape[1] // COMBINE_TILE)


def _readable(values: torch.Tensor) -> torch.Tensor:
    """8-bit floats viewed as bytes: not every GPU supports them, and Triton has no e8m0 (powers of two)."""
    return values.view(torch.uint8) if values.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu) else values
