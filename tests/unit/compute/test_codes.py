import math

import numpy as np
import pytest
import torch

from tandem.compute.codes import CodedMatrix, CodeKind
from tandem.compute.order import Order

OUT, IN = 5, 39  # NOTE: no multiple of anything: the last byte has one code, the last group is short


def number(matrix: CodedMatrix, row: int, column: int) -> float:
    """The definition, one element at a time. `column`: of the codes."""
    group = column // matrix.group_size
    if matrix.table is None:
        code = float(matrix.codes[row, column].float())
    else:
        byte = int(matrix.codes[row, column // 2])
        code = float(matrix.table[byte >> 4 if column % 2 else byte & 15])
    found = np.float32(code) * (np.float32(float(matrix.scales[row, group].float())) * np.float32(matrix.factor))
    if matrix.offsets is not None:
        found = found + np.float32(float(matrix.offsets[row, group].float()))
    return float(found)


def random_matrix(kind: CodeKind, group_size: int, scales: torch.dtype, *, has_offsets: bool) -> CodedMatrix:
    torch.manual_seed(3)
    groups = math.ceil(IN / group_size)
    codes = torch.randint(0, 256, (OUT, math.ceil(IN / 2) if kind is CodeKind.TABLE4 else IN)).to(torch.uint8)
    if kind is CodeKind.INT8:
        codes = codes.view(torch.int8)
    if kind is CodeKind.E4M3:
        codes = torch.randn(OUT, IN).to(torch.float8_e4m3fn)
    return CodedMatrix(
        kind=kind,
        shape=(OUT, IN),
        codes=codes,
        scales=(torch.rand(OUT, groups) + 0.1).to(scales),
        group_size=group_size,
        table=torch.randn(16) if kind is CodeKind.TABLE4 else None,
        offsets=torch.randn(OUT, groups) if has_offsets else None,
        factor=0.37,
    )


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu], ids=str)
@pytest.mark.parametrize("has_offsets", [False, True], ids=["symmetric", "offsets"])
@pytest.mark.parametrize("group_size", [4, 16, IN, 64])
@pytest.mark.parametrize("kind", CodeKind, ids=lambda kind: kind.name)
def test_a_number_is_its_code_times_scale_and_factor_plus_offset(
    kind: CodeKind, group_size: int, has_offsets: bool, scales: torch.dtype
) -> None:
    matrix = random_matrix(kind, group_size, scales, has_offsets=has_offsets)
    expected = torch.tensor([[number(matrix, row, column) for column in range(IN)] for row in range(OUT)])
    assert torch.equal(matrix.decode(), expected)
    assert torch.equal(matrix.decode(start=1, stop=3), expected[1:3])
    assert torch.equal(matrix.decode(torch.bfloat16), expected.bfloat16())


def test_permuted_codes_are_decoded_into_the_order_of_the_inputs() -> None:
    plain = random_matrix(CodeKind.INT8, 8, torch.float32, has_offsets=True)
    permutation = torch.randperm(IN)
    matrix = CodedMatrix(
        kind=plain.kind,
        shape=plain.shape,
        codes=plain.codes,
        scales=plain.scales,
        group_size=plain.group_size,
        offsets=plain.offsets,
        factor=plain.factor,
        permutation=permutation,
    )
    x = torch.randn(3, IN)
    assert torch.equal(matrix.decode()[:, permutation], plain.decode())
    torch.testing.assert_close(x @ matrix.decode().T, x[:, permutation] @ plain.decode().T)


def test_bytes_are_those_of_all_that_is_kept() -> None:
    matrix = random_matrix(CodeKind.TABLE4, 8, torch.bfloat16, has_offsets=True)
    assert matrix.num_bytes == OUT * 20 + OUT * 5 * 2 + 16 * 4 + OUT * 5 * 4


def test_a_matrix_in_strips_may_lie_as_its_kernels_like() -> None:
    strips = CodedMatrix(
        kind=CodeKind.INT8,
        shape=(OUT, IN),
        codes=torch.zeros(1024, dtype=torch.int8),
        scales=torch.ones(16),
        group_size=IN,
        order=Order.STRIPS,
    )
    assert strips.shape == (OUT, IN)
    with pytest.raises(AssertionError, match="kernels that packed"):
        strips.decode()
