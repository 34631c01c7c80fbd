"""Products with weights as codes: against float64 products with the numbers that the codes are defined to stand for.

Triton's are interpreted in `tests/unit/compute/cuda/test_coded.py`, by the same `check` over fewer cases.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from tandem.architecture.feed_forward import Activation
from tandem.compute.codes import CodedMatrix, CodeKind
from tandem.compute.native.bindings import NativeKernels
from tandem.compute.torch.kernels import TorchKernels
from tests.helpers.coded_matrices import E2M1, INT4, random_coded
from tests.helpers.native_kernels import ARCHITECTURES, load_or_skip
from tests.helpers.numbers import normal

Implementation = NativeKernels | TorchKernels
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RELATIVE = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
KINDS = pytest.mark.parametrize("kind", CodeKind, ids=lambda kind: kind.name)
SHAPES = ((1, 32), (16, 128), (33, 256), (70, 200), (17, 1000), (5, 39))
NF4 = torch.tensor(
    [
        *(-1.0, -0.696193, -0.525073, -0.394917, -0.284441, -0.184773, -0.09105, 0.0),
        *(0.07958, 0.16093, 0.246112, 0.337915, 0.44071, 0.562617, 0.722957, 1.0),
    ]
)


@pytest.fixture(scope="module", params=[*ARCHITECTURES, "torch"])
def kernels(request: pytest.FixtureRequest) -> Implementation:
    return TorchKernels() if request.param == "torch" else load_or_skip(request.param)


def check(kernels: Implementation, matrix: CodedMatrix, x: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """The product of the matrix as it is and, if it can be packed, of its strips.

    Its bound is of float32 sums, unless numbers were rounded before.
    """
    numbers = matrix.decode().double()
    expected = x.double() @ numbers.T
    magnitude = x.double().abs() @ numbers.abs().T + 1.0
    matrices = [matrix, kernels.pack_coded(matrix)] if kernels.can_pack_coded(matrix) else [matrix]
    for each in matrices:
        product = kernels.coded_linear(x, each, bias, out_dtype=torch.float32)
        errors = (product.double() - expected - (0.0 if bias is None else bias.double())).abs()
        bound = (2 * RELATIVE[x.dtype] if rounds_numbers(kernels, matrix, x.dtype) else 4e-6) * magnitude
        if matrix.offsets is not None:
            bound = bound + 4e-6 * (x.double().abs() @ torch.ones_like(numbers).T) * 4
        assert (errors <= bound).all(), (errors / bound).max()
        rounded = kernels.coded_linear(x, each, bias)
        assert rounded.dtype == x.dtype
        if type(kernels) is not TorchKernels:
            assert torch.equal(rounded, product.to(x.dtype))


def rounds_numbers(kernels: Implementation, matrix: CodedMatrix, dtype: torch.dtype) -> bool:
    """Whether products are with numbers rounded to the dtype of the rows. Codes of integers and of floats of 8 bits or
    less are exact in all of them.
    """
    if type(kernels) is TorchKernels:
        return True
    return matrix.table is NF4 and (dtype is torch.bfloat16 or not isinstance(kernels, NativeKernels))


@KINDS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_match_float64(
    kernels: Implementation, kind: CodeKind, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    for group_size in (16, 32, 64, 128, 256, shape[1]):
        matrix = random_coded(kind, shape, group_size, seed=group_size)
        for m in (1, 3, 20):
            check(kernels, matrix, normal(m, m, shape[1], dtype=dtype), normal(9, shape[0], dtype=dtype))


@KINDS
@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e8m0fnu])
@pytest.mark.parametrize("offsets", [None, torch.float32, torch.bfloat16, torch.float16])
def test_scales_and_offsets_of_every_dtype(
    kernels: Implementation, kind: CodeKind, scales: torch.dtype, offsets: torch.dtype | None
) -> None:
    for group_size in (16, 32, 128, 300):
        matrix = random_coded(kind, (21, 300), group_size, scales=scales, offsets=offsets, factor=0.37)
        for m in (1, 7):
            check(kernels, matrix, normal(m, m, 300, dtype=torch.float32))
            check(kernels, matrix, normal(m, m, 300, dtype=torch.bfloat16))


@KINDS
@pytest.mark.parametrize("dtype", DTYPES)
def test_integers_are_multiples_of_a_number_of_more_inputs(
    kernels: Implementation, kind: CodeKind, dtype: torch.dtype
) -> None:
    for group_size, super_size in ((16, 256), (32, 256), (128, 128)):
        matrix = random_coded(kind, (21, 300), group_size, super_size=super_size)
        for m in (1, 7, 30):
            check(kernels, matrix, normal(m, m, 300, dtype=dtype))


@KINDS
@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_are_taken_in_the_order_of_the_permutation(
    kernels: Implementation, kind: CodeKind, dtype: torch.dtype
) -> None:
    for group_size, offsets in ((32, torch.float32), (128, None)):
        matrix = random_coded(kind, (40, 264), group_size, is_permuted=True, offsets=offsets)
        for m in (1, 2, 9):
            check(kernels, matrix, normal(m, m, 264, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("table", [INT4, E2M1, NF4, INT4 + 8], ids=["int4", "e2m1", "nf4", "uint4"])
def test_tables_of_any_numbers(kernels: Implementation, table: torch.Tensor, dtype: torch.dtype) -> None:
    for m in (1, 12):
        check(kernels, random_coded(CodeKind.TABLE4, (48, 160), 32, table=table), normal(m, m, 160, dtype=dtype))


@KINDS
def test_every_code_is_the_number_that_it_stands_for(kernels: Implementation, kind: CodeKind) -> None:
    """Rows of the unit matrix bring out one number each: no sum hides one that is wrong by a little."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256).repeat(3, 1)
    if kind is CodeKind.E4M3:
        codes[codes & 0x7F == 0x7F] = 0
    dtypes = {CodeKind.INT8: torch.int8, CodeKind.E4M3: torch.float8_e4m3fn, CodeKind.TABLE4: torch.uint8}
    shape = (3, 512 if kind is CodeKind.TABLE4 else 256)
    scales, table = torch.ones(3, 1), E2M1 if kind is CodeKind.TABLE4 else None
    matrix = CodedMatrix(
        kind=kind, shape=shape, codes=codes.view(dtypes[kind]), scales=scales, group_size=shape[1], table=table
    )
    for dtype in DTYPES:
        for rows in (torch.eye(shape[1], dtype=dtype), torch.eye(shape[1], dtype=dtype)[200:201]):
            product = kernels.coded_linear(rows, matrix, out_dtype=torch.float32)
            assert torch.equal(product, (rows.float() @ matrix.decode().T))


def test_no_rows_give_no_rows(kernels: Implementation) -> None:
    matrix = random_coded(CodeKind.INT8, (4, 16), 16)
    assert kernels.coded_linear(torch.empty(0, 16), matrix).shape == (0, 4)


def test_rows_may_be_strided(kernels: Implementation) -> None:
    for dtype in DTYPES:
        around = torch.full((5, 75), math.nan, dtype=dtype)
        around[:, 3:67] = normal(0, 5, 64, dtype=dtype)
        check(kernels, random_coded(CodeKind.TABLE4, (20, 64), 32), around[:, 3:67])


@KINDS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_products_match_float64(
    kernels: Implementation, kind: CodeKind, dtype: torch.dtype, activation: Activation
) -> None:
    for (outputs, inputs), group_size, has_more in (
        ((33, 200), 32, False),
        ((16, 136), 136, True),
        ((5, 39), 16, True),
    ):
        offsets = torch.bfloat16 if has_more else None
        gate, up = (random_coded(kind, (outputs, inputs), group_size, seed=seed, offsets=offsets) for seed in range(2))
        if has_more:
            permutation = torch.randperm(inputs, generator=torch.Generator().manual_seed(0))
            gate, up = replace(gate, permutation=permutation), replace(up, permutation=permutation.clone())
        biases = [normal(seed, outputs, dtype=dtype) if has_more else None for seed in (3, 4)]
        for m in (1, 2, 13):
            x = normal(m, m, inputs, dtype=dtype)
            products = [
                x.double() @ each.decode().double().T + (0.0 if bias is None else bias.double())
                for each, bias in zip((gate, up), biases, strict=True)
            ]
            inner = (
                functional.silu(products[0])
                if activation == "silu"
                else functional.gelu(products[0], approximate="tanh")
            )
            expected = inner * products[1]
            result = kernels.coded_gated_linear(x, gate, up, activation, *biases)
            assert result is not None
            assert result.dtype == dtype
            magnitude = (products[0].abs() + 1) * (products[1].abs() + 1)
            loss = 40 * RELATIVE[dtype] if isinstance(kernels, TorchKernels) else RELATIVE[dtype] + 4e-5
            assert ((result.double() - expected).abs() <= loss * magnitude).all()
