"""Promises of the compiled products with codes beyond the contract: the same bits in any company and any order."""

from dataclasses import replace

import pytest
import torch

from tandem.compute.codes import CodedMatrix, CodeKind
from tandem.compute.native.bindings import NativeKernels
from tandem.compute.order import Order
from tests.helpers.coded_matrices import E2M1, INT4, IQ4_NL, random_coded
from tests.helpers.native_kernels import ARCHITECTURES, load_or_skip
from tests.helpers.numbers import bits, normal
from tests.helpers.published_formats import NF4

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
KINDS = pytest.mark.parametrize("kind", CodeKind, ids=lambda kind: kind.name)
CODES = {
    "int4": (CodeKind.TABLE4, INT4),
    "e2m1": (CodeKind.TABLE4, E2M1),
    "nf4": (CodeKind.TABLE4, torch.from_numpy(NF4)),
    "iq4_nl": (CodeKind.TABLE4, IQ4_NL),
    "int8": (CodeKind.INT8, INT4),
    "e4m3": (CodeKind.E4M3, INT4),
}
EVERY_CODE = pytest.mark.parametrize("name", CODES)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    return load_or_skip(request.param)


def matrices(kind: CodeKind, shape: tuple[int, int], table: torch.Tensor = INT4) -> list[CodedMatrix]:
    plain = [random_coded(kind, shape, group_size, table=table) for group_size in (16, 32, 128, shape[1])]
    integers = random_coded(kind, shape, 16, super_size=256, table=table)
    return [*plain, integers, random_coded(kind, shape, 32, offsets=torch.bfloat16, is_permuted=True, table=table)]


def matrices_of(name: str, shape: tuple[int, int]) -> list[CodedMatrix]:
    kind, table = CODES[name]
    return matrices(kind, shape, table)


@EVERY_CODE
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_the_batch(kernels: NativeKernels, name: str, dtype: torch.dtype) -> None:
    rows = normal(1, 40, 520, dtype=dtype)
    for matrix in matrices_of(name, (35, 520)):
        packed, bias = kernels.pack_coded(matrix), normal(2, 35, dtype=dtype)
        alone = torch.cat([kernels.coded_linear(row[None], packed, bias) for row in rows])
        for m in range(1, 41):
            assert torch.equal(bits(kernels.coded_linear(rows[:m], packed, bias)), bits(alone[:m])), m
        assert torch.equal(bits(kernels.coded_linear(rows, matrix, bias)), bits(alone))


@EVERY_CODE
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_chunks_of_rows(kernels: NativeKernels, name: str, dtype: torch.dtype) -> None:
    rows = normal(1, 1700, 136, dtype=dtype)
    for matrix in matrices_of(name, (40, 136)):
        packed = kernels.pack_coded(matrix)
        whole = kernels.coded_linear(rows, packed)
        for first, last in ((0, 1), (383, 385), (0, 384), (100, 900), (1699, 1700)):
            assert torch.equal(bits(kernels.coded_linear(rows[first:last], packed)), bits(whole[first:last]))


@KINDS
def test_results_do_not_depend_on_the_number_of_threads(kernels: NativeKernels, kind: CodeKind) -> None:
    matrix = kernels.pack_coded(random_coded(kind, (1001, 1024), 64, offsets=torch.float32))
    before = torch.get_num_threads()
    for m in (1, 5, 200):
        rows, results = normal(m, m, 1024, dtype=torch.bfloat16), []
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append(kernels.coded_linear(rows, matrix))
        torch.set_num_threads(before)
        assert all(torch.equal(bits(result), bits(results[0])) for result in results)


@KINDS
def test_packed_codes_are_as_large_as_the_rows(kernels: NativeKernels, kind: CodeKind) -> None:
    for matrix in (
        random_coded(kind, (48, 256), 32, offsets=torch.float16),
        random_coded(kind, (48, 512), 16, super_size=256),
    ):
        packed = kernels.pack_coded(matrix)
        assert packed.num_bytes == matrix.num_bytes
        assert packed.order is Order.STRIPS
        assert not kernels.can_pack_coded(packed)


@KINDS
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_looked_up_whatever_their_order(kernels: NativeKernels, kind: CodeKind, dtype: torch.dtype) -> None:
    indices = torch.tensor([34, 0, 17, 0])
    for matrix in matrices(kind, (35, 264)):
        expected = matrix.decode()[indices]
        for each in (matrix, kernels.pack_coded(matrix)):
            found = kernels.coded_rows(each, indices, dtype)
            assert found.dtype == dtype
            torch.testing.assert_close(found, expected.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
            assert torch.equal(bits(kernels.coded_rows(each, indices[2:3], dtype)), bits(found[2:3]))


@KINDS
def test_shapes_of_strips_are_known_without_numbers(kernels: NativeKernels, kind: CodeKind) -> None:
    matrix = random_coded(kind, (50, 300), 64, offsets=torch.float16)
    names = ("codes", "scales", "offsets")
    meta = replace(matrix, **{name: getattr(matrix, name).to("meta") for name in names})
    packed, expected = kernels.pack_coded(meta), kernels.pack_coded(matrix)
    for name in names:
        assert getattr(packed, name).device.type == "meta"
        assert getattr(packed, name).shape == getattr(expected, name).shape


@pytest.mark.parametrize("group_size", [4, 12, 24, 48, 96, 192])
def test_groups_that_no_block_of_a_sum_holds_are_not_packed(kernels: NativeKernels, group_size: int) -> None:
    assert kernels.can_pack_coded(random_coded(CodeKind.INT8, (16, 512), 256))
    assert not kernels.can_pack_coded(random_coded(CodeKind.INT8, (16, 512), group_size))


@KINDS
def test_a_nan_in_one_row_stays_in_that_row(kernels: NativeKernels, kind: CodeKind) -> None:
    matrix = kernels.pack_coded(random_coded(kind, (10, 64), 32))
    for m in (2, 9):
        rows = normal(0, m, 64, dtype=torch.bfloat16)
        rows[1, 7] = float("nan")
        nan_rows = kernels.coded_linear(rows, matrix).isnan()
        assert nan_rows[1].all()
        assert int(nan_rows.sum()) == 10


@EVERY_CODE
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_rows_do_not_depend_on_the_batch(kernels: NativeKernels, name: str, dtype: torch.dtype) -> None:
    rows = normal(1, 30, 264, dtype=dtype)
    for gate, up in zip(matrices_of(name, (35, 264)), matrices_of(name, (35, 264)), strict=True):
        alone = torch.cat([gated(kernels, row[None], gate, up) for row in rows])
        packed = kernels.pack_coded(gate), kernels.pack_coded(up)
        for m in (1, 2, 3, 5, 13, 30):
            assert torch.equal(bits(gated(kernels, rows[:m], *packed)), bits(alone[:m])), m


def gated(kernels: NativeKernels, rows: torch.Tensor, gate: CodedMatrix, up: CodedMatrix) -> torch.Tensor:
    product = kernels.coded_gated_linear(rows, gate, up, "silu")
    assert product is not None
    return product


def test_a_gate_and_an_up_that_are_decoded_in_different_ways_are_not_multiplied_at_once(kernels: NativeKernels) -> None:
    gate, shape = random_coded(CodeKind.TABLE4, (16, 128), 32), (16, 128)
    others = (
        random_coded(CodeKind.INT8, shape, 32),
        random_coded(CodeKind.TABLE4, shape, 64),
        random_coded(CodeKind.TABLE4, shape, 32, table=E2M1),
        random_coded(CodeKind.TABLE4, shape, 32, offsets=torch.float32),
        random_coded(CodeKind.TABLE4, shape, 32, is_permuted=True),
        kernels.pack_coded(gate),
    )
    rows = normal(0, 2, 128, dtype=torch.float32)
    assert kernels.coded_gated_linear(rows, gate, random_coded(CodeKind.TABLE4, shape, 32, seed=1), "silu") is not None
    for other in others:
        assert kernels.coded_gated_linear(rows, gate, other, "silu") is None
