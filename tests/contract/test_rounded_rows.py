"""Products of codes with rows that are rounded to 8 bits: float64 products with the rows that the definition gives."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from tandem.compute.codes import CodedMatrix, CodeKind
from tandem.compute.native.bindings import NativeKernels
from tandem.compute.ops import ExpertWeights
from tandem.compute.rounded_rows import round_rows
from tandem.compute.torch.kernels import TorchKernels
from tests.helpers.coded_matrices import E2M1, INT4, IQ4_NL, random_coded
from tests.helpers.native_kernels import ARCHITECTURES, load_or_skip
from tests.helpers.numbers import normal

Implementation = NativeKernels | TorchKernels
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CODES = {  # of every way in which processors multiply bytes
    "int8": (CodeKind.INT8, INT4),
    "int4": (CodeKind.TABLE4, INT4),
    "uint4": (CodeKind.TABLE4, INT4 + 8),
    "e2m1": (CodeKind.TABLE4, E2M1),
    "iq4_nl": (CodeKind.TABLE4, IQ4_NL),
}
EVERY_CODE = pytest.mark.parametrize("name", CODES)
PORTABLE = pytest.param("x86-64-v2", marks=pytest.mark.slow)  # compiled by nothing else


@pytest.fixture(scope="module", params=[*ARCHITECTURES, PORTABLE])
def native(request: pytest.FixtureRequest) -> NativeKernels:
    return load_or_skip(request.param)


@pytest.fixture(scope="module", params=[*ARCHITECTURES, PORTABLE, "torch"])
def kernels(request: pytest.FixtureRequest) -> Implementation:
    return TorchKernels() if request.param == "torch" else load_or_skip(request.param)


def rounding(name: str, shape: tuple[int, int], group_size: int, **more: object) -> CodedMatrix:
    kind, table = CODES[name]
    return replace(random_coded(kind, shape, group_size, table=table, **more), rounds_rows=True)  # type: ignore[arg-type]


def rounded(x: torch.Tensor, matrix: CodedMatrix) -> torch.Tensor:
    """The rows that are multiplied, in the inputs' own order."""
    order = torch.arange(x.shape[1]) if matrix.permutation is None else matrix.permutation
    out = torch.empty(x.shape)
    out[:, order] = round_rows(x[:, order], matrix.segment_size)
    return out


def check(kernels: Implementation, matrix: CodedMatrix, x: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    numbers, rows = matrix.decode().double(), rounded(x, matrix).double()
    expected = rows @ numbers.T + (0.0 if bias is None else bias.double())
    magnitude = rows.abs() @ numbers.abs().T + 1.0
    if matrix.offsets is not None:
        magnitude += 4 * rows.abs().sum(-1, keepdim=True)
    products = []
    for each in (matrix, kernels.pack_coded(matrix)) if kernels.can_pack_coded(matrix) else (matrix,):
        products.append(kernels.coded_linear(x, each, bias, out_dtype=torch.float32))
        assert ((products[-1].double() - expected).abs() <= 4e-6 * magnitude).all()
        assert torch.equal(kernels.coded_linear(x, each, bias), products[-1].to(x.dtype))
    assert all(torch.equal(product, products[0]) for product in products)


@EVERY_CODE
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_those_of_rounded_rows(kernels: Implementation, name: str, dtype: torch.dtype) -> None:
    for shape in ((1, 32), (33, 256), (70, 200), (17, 1000), (5, 39)):
        for group_size in (8, 32, 128, 256, shape[1]):
            matrix = rounding(name, shape, group_size, seed=group_size)
            for m in (1, 3, 20):
                check(kernels, matrix, normal(m, m, shape[1], dtype=dtype), normal(9, shape[0], dtype=dtype))


@EVERY_CODE
def test_offsets_supers_and_permutations(kernels: Implementation, name: str) -> None:
    for m in (1, 2, 9):
        for dtype in DTYPES:
            x = normal(m, m, 300, dtype=dtype)
            check(kernels, rounding(name, (21, 300), 32, offsets=torch.bfloat16, is_permuted=True), x)
            check(kernels, rounding(name, (21, 300), 32, super_size=256), x)
            check(kernels, rounding(name, (21, 300), 300, scales=torch.float16, factor=0.37), x)


@EVERY_CODE
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_sums_of_the_largest_numbers_do_not_saturate(kernels: Implementation, name: str, sign: float) -> None:
    """Products of bytes are added in pairs of 16 bits, which hold no two of 255 * 127."""
    kind, table = CODES[name]
    for extreme in (table.argmin(), table.argmax()):
        code = 128 if kind is CodeKind.INT8 and extreme == 0 else 127 if kind is CodeKind.INT8 else int(extreme) * 17
        plain = rounding(name, (20, 384), 128)
        codes = torch.full_like(plain.codes.view(torch.uint8), code).view(plain.codes.dtype)
        for m in (1, 7):
            check(kernels, replace(plain, codes=codes), torch.full((m, 384), sign))


@EVERY_CODE
def test_rows_do_not_depend_on_the_batch_or_on_threads(native: NativeKernels, name: str) -> None:
    before = torch.get_num_threads()
    for group_size, offsets in ((16, None), (128, torch.float32)):
        plain = rounding(name, (35, 520), group_size, offsets=offsets)
        packed, rows = native.pack_coded(plain), normal(1, 410, 520, dtype=torch.bfloat16)
        alone = torch.cat([native.coded_linear(row[None], packed) for row in rows])
        for m in (*range(1, 30), 47, 410):
            assert torch.equal(native.coded_linear(rows[:m], packed), alone[:m]), m
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert torch.equal(native.coded_linear(rows, packed), alone)
        torch.set_num_threads(before)


@EVERY_CODE
def test_a_nan_or_an_infinity_stays_in_its_row(kernels: Implementation, name: str) -> None:
    for value in (float("nan"), float("inf")):
        rows = normal(0, 9, 64)
        rows[1, 7] = value
        wrong = ~kernels.coded_linear(rows, rounding(name, (10, 64), 32)).isfinite()
        assert wrong[1].all()
        assert int(wrong.sum()) == 10


def test_rows_of_nothing_are_zeros(kernels: Implementation) -> None:
    for size in (0.0, 1e-38, 1e-44):
        assert not kernels.coded_linear(torch.full((2, 64), size), rounding("int8", (10, 64), 32)).any()


def test_an_outlier_costs_precision_in_its_segment_alone() -> None:
    x = normal(0, 1, 256)
    plain = round_rows(x, 128)
    x[0, 200] = 1000.0
    assert torch.equal(round_rows(x, 128)[:, :128], plain[:, :128])
    assert (round_rows(x, 128)[0, 128:] == 0).sum() > 100


def test_halves_are_rounded_to_even() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]])
    assert round_rows(x, 8).tolist() == [[127.0, 0.0, 2.0, 2.0, 0.0, -2.0]]


@EVERY_CODE
def test_gated_products(native: NativeKernels, name: str) -> None:
    gate, up = (rounding(name, (33, 200), 32, seed=seed) for seed in range(2))
    for m in (1, 13):
        x = normal(m, m, 200)
        first, second = (rounded(x, each).double() @ each.decode().double().T for each in (gate, up))
        product = native.coded_gated_linear(x, native.pack_coded(gate), native.pack_coded(up), "silu")
        assert product is not None
        torch.testing.assert_close(product.double(), functional.silu(first) * second, rtol=1e-4, atol=1e-4)


def test_a_gate_that_rounds_rows_and_an_up_that_does_not_are_multiplied_one_by_one(native: NativeKernels) -> None:
    gate = rounding("int4", (16, 128), 32)
    assert native.coded_gated_linear(normal(0, 2, 128), gate, replace(gate, rounds_rows=False), "silu") is None


@EVERY_CODE
@pytest.mark.parametrize("which", ["both", "gate and up", "down"])
def test_experts_round_rows_too(native: NativeKernels, name: str, which: str) -> None:
    """Before one product of an expert or both: of what goes in, and of what the gate lets through."""

    def matrix(rounds: bool, shape: tuple[int, int], group_size: int, **more: object) -> CodedMatrix:
        if rounds:
            return native.pack_coded(rounding(name, shape, group_size, **more))
        return native.pack_coded(random_coded(CodeKind.E4M3, shape, group_size, **more))  # type: ignore[arg-type]

    experts = []
    for seed in range(4):
        gate, up = (matrix(which != "down", (48, 96), 32, seed=seed + more) for more in (0, 10))
        down = matrix(which != "gate and up", (96, 48), 16, seed=seed + 20, is_permuted=seed == 1)
        experts.append(ExpertWeights(gate, up, down, None, None, None))
    call = native.experts("silu", None, experts)
    assert call is not None
    x, chosen = normal(1, 21, 96, dtype=torch.bfloat16), torch.arange(42).view(21, 2) % 4
    weights = torch.rand(21, 2, generator=torch.Generator().manual_seed(0))
    expected = torch.zeros(21, 96)
    for index, expert in enumerate(experts):
        inner = native.coded_gated_linear(x, expert.gate, expert.up, "silu")  # type: ignore[arg-type]
        assert inner is not None
        out = native.coded_linear(inner, expert.down, out_dtype=torch.float32)  # type: ignore[arg-type]
        expected += out * ((chosen == index) * weights).sum(-1, keepdim=True)
    torch.testing.assert_close(call(x, weights, chosen), expected, rtol=1e-6, atol=1e-6)


def test_only_integers_are_multiplied_so() -> None:
    nf4 = torch.linspace(-1, 1, 16)
    assert random_coded(CodeKind.INT8, (4, 32), 32).has_integers
    assert random_coded(CodeKind.TABLE4, (4, 32), 32, table=IQ4_NL).has_integers
    assert not random_coded(CodeKind.TABLE4, (4, 32), 32, table=nf4).has_integers
    assert not random_coded(CodeKind.E4M3, (4, 32), 32).has_integers
