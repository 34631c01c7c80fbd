"""Triton's products with weights as codes in interpreter mode on CPU, by the checks of all kernels' contract."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tandem.compute.choose import choose_kernels
from tandem.compute.codes import CodedMatrix, CodeKind
from tandem.compute.cuda.halves import halved, unpacked_rows
from tandem.compute.cuda.kernels import TritonKernels
from tandem.compute.order import Order
from tandem.compute.torch.kernels import TorchKernels
from tests.contract.test_coded_kernels import NF4, check
from tests.contract.test_coded_kernels import test_gated_products_match_float64 as check_gated_products
from tests.helpers.coded_matrices import E2M1, random_coded
from tests.helpers.numbers import normal
from tests.helpers.triton_interpreter import products

pytest.importorskip("triton", reason="triton is not installed")

BFLOAT16, FLOAT32, HALF = torch.bfloat16, torch.float32, torch.float16
FORMATS: dict[str, tuple[CodeKind, int, dict[str, Any]]] = {  # kind, group size, and what else it has
    "int4, groups of 32": (CodeKind.TABLE4, 32, {"scales": BFLOAT16}),
    "int4, groups of 128 with zero points": (CodeKind.TABLE4, 128, {"scales": HALF, "offsets": FLOAT32}),
    "int4, groups of 16 with zero points": (CodeKind.TABLE4, 16, {"offsets": HALF}),
    "int4 in the order of groups": (CodeKind.TABLE4, 64, {"is_permuted": True}),
    "int4 by channel": (CodeKind.TABLE4, 1 << 20, {}),
    "mxfp4": (CodeKind.TABLE4, 32, {"table": E2M1, "scales": torch.float8_e8m0fnu}),
    "nvfp4": (CodeKind.TABLE4, 16, {"table": E2M1, "scales": torch.float8_e4m3fn, "factor": 0.3}),
    "nf4": (CodeKind.TABLE4, 64, {"table": NF4}),
    "int8 by channel": (CodeKind.INT8, 1 << 20, {"scales": BFLOAT16}),
    "int8, groups with zero points": (CodeKind.INT8, 128, {"offsets": BFLOAT16}),
    "int4 of super-blocks": (CodeKind.TABLE4, 32, {"super_size": 256}),
    "int8 of super-blocks": (CodeKind.INT8, 16, {"super_size": 256}),
    "fp8, blocks": (CodeKind.E4M3, 128, {}),
    "fp8, one scale": (CodeKind.E4M3, 1 << 20, {"factor": 0.01}),
}


@pytest.fixture
def kernels() -> Iterator[TritonKernels]:
    with products():
        yield TritonKernels()


def coded(name: str, shape: tuple[int, int]) -> CodedMatrix:
    kind, group_size, options = FORMATS[name]
    return random_coded(kind, shape, min(group_size, shape[1]), **options)


@pytest.mark.parametrize("name", FORMATS)
def test_products_match_float64(kernels: TritonKernels, name: str) -> None:
    """Of few rows; inputs that fill no group."""
    dtype = (FLOAT32, BFLOAT16, HALF)[list(FORMATS).index(name) % 3]
    check(kernels, coded(name, (5, 200)), normal(1, 2, 200, dtype=dtype), normal(9, 5, dtype=dtype))


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, HALF])
@pytest.mark.parametrize("shape", [(1, 32), (70, 200), (17, 1100), (5, 39)])
def test_products_of_every_dtype_and_size(
    kernels: TritonKernels, name: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    for m in (1, 17, 66):
        check(kernels, coded(name, shape), normal(m, m, shape[1], dtype=dtype), normal(9, shape[0], dtype=dtype))


@pytest.mark.parametrize(
    "name",
    [
        "int4, groups of 128 with zero points",
        pytest.param("int8, groups with zero points", marks=pytest.mark.slow),
        pytest.param("nvfp4", marks=pytest.mark.slow),
    ],
)
def test_no_bit_depends_on_the_number_of_rows(name: str) -> None:
    """Few rows, more, and so many that one program adds both splits."""
    matrix, x = coded(name, (3, 1056)), normal(0, 65, 1056, dtype=BFLOAT16)
    with products(ordered=True):
        kernels = TritonKernels()
        whole = kernels.coded_linear(x, matrix)
        assert torch.equal(kernels.coded_linear(x[:1], matrix), whole[:1])
        assert torch.equal(kernels.coded_linear(x[3:20], matrix), whole[3:20])


@pytest.mark.parametrize("kind", [CodeKind.INT8, CodeKind.TABLE4])
def test_one_zero_point_may_belong_to_fewer_inputs_than_a_span(kernels: TritonKernels, kind: CodeKind) -> None:
    """Their number is no power of two."""
    check(kernels, random_coded(kind, (5, 90), 90, offsets=HALF), normal(1, 2, 90, dtype=FLOAT32))


def test_memory_of_partial_sums_is_taken_for_few_rows_only(
    kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It grows with rows times splits: of a long prompt it would be gigabytes."""
    empty, sizes = torch.empty, list[int]()

    def recorded(*shape: Any, **options: Any) -> torch.Tensor:
        made = empty(*shape, **options)
        sizes.append(made.untyped_storage().nbytes())
        return made

    matrix = kernels.pack_coded(coded("int8 by channel", (3, 1056)))
    for num_rows, num_splits in ((64, 2), (65, 0)):
        sizes.clear()
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", recorded)
            kernels.coded_linear(normal(0, num_rows, 1056, dtype=FLOAT32), matrix)
        assert sorted(sizes) == sorted([num_rows * 3 * 4, num_splits * num_rows * 3 * 4])


@pytest.mark.parametrize("activation", ["silu", pytest.param("gelu_tanh", marks=pytest.mark.slow)])
def test_gated_products_match_float64(kernels: TritonKernels, activation: Any) -> None:
    check_gated_products(kernels, CodeKind.TABLE4, BFLOAT16, activation)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("inputs", [39, 200])
def test_halves_hold_the_same_numbers(name: str, inputs: int) -> None:
    matrix = coded(name, (6, inputs))
    packed = TritonKernels().pack_coded(matrix)
    assert packed.order is Order.STRIPS
    assert torch.equal(unpacked_rows(packed).decode(), matrix.decode())
    rows = torch.tensor([4, 0, 4])
    assert torch.equal(TritonKernels().coded_rows(packed, rows, BFLOAT16), matrix.decode_rows(rows, BFLOAT16))
    on_meta = halved(replace(matrix, **{name: tensor.to("meta") for name, tensor in matrix.tensors()}))  # type: ignore[arg-type]
    assert [(n, t.shape) for n, t in on_meta.tensors()] == [(n, t.shape) for n, t in packed.tensors()]


def test_what_has_no_product_is_decoded_and_named_once(
    kernels: TritonKernels, caplog: pytest.LogCaptureFixture
) -> None:
    matrix = random_coded(CodeKind.INT8, (4, 96), 48)
    with caplog.at_level(logging.WARNING):
        assert not kernels.can_pack_coded(matrix)
        check_torch(kernels, matrix)
    assert [record.getMessage() for record in caplog.records] == [
        "codes are decoded before each product, answers take longer: groups of 48 inputs are neither 16, 32 or 64 nor "
        "a multiple of 128"
    ]


def check_torch(kernels: TritonKernels, matrix: CodedMatrix) -> None:
    x = normal(0, 3, matrix.shape[1], dtype=FLOAT32)
    assert torch.equal(kernels.coded_linear(x, matrix), TorchKernels().coded_linear(x, matrix))


def test_kernels_of_a_gpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Triton's where the GPU can run them, else PyTorch's with the reason."""
    for capability, expected in (((8, 0), TritonKernels), ((7, 5), TorchKernels)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert type(choose_kernels(torch.device("cuda"))) is expected
    assert "compute capability (7, 5) is below (8, 0)" in caplog.text
