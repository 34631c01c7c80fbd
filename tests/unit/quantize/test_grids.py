"""Each grid: its numbers are the nearest ones, its scales survive their dtype, and what it stores reads back."""

import numpy as np
import pytest
import torch

from tandem.quantize.grids import Fp8Grid, Grid, IntegerGrid, Mxfp4Grid, Nvfp4Grid
from tandem.quantize.rounding import round_to_nearest

BF16 = torch.bfloat16
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
GRIDS: dict[str, tuple[Grid, list[float]]] = {
    "int4 in groups": (IntegerGrid(4, 32, BF16), [float(number) for number in range(-8, 8)]),
    "int4 by output": (IntegerGrid(4, None, torch.float16), [float(number) for number in range(-8, 8)]),
    "int8": (IntegerGrid(8, None, BF16), [float(number) for number in range(-128, 128)]),
    "fp8": (Fp8Grid(BF16), E4M3[E4M3.isfinite()].tolist()),
    "mxfp4": (Mxfp4Grid(), [sign * number for number in E2M1 for sign in (1, -1)]),
    "nvfp4": (Nvfp4Grid(), [sign * number for number in E2M1 for sign in (1, -1)]),
}
parametrised = pytest.mark.parametrize(("grid", "table"), GRIDS.values(), ids=GRIDS.keys())


def weight(outputs: int = 6, inputs: int = 96) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs))


@parametrised
def test_numbers_are_the_nearest_of_the_format(grid: Grid, table: list[float]) -> None:
    x = torch.linspace(-1.3 * max(table), 1.3 * max(table), 4001)
    numbers = torch.tensor(sorted(set(table)))
    distances = (x[:, None] - numbers).abs()
    found = grid.nearest(x)
    assert torch.isin(found, numbers).all()
    torch.testing.assert_close((found - x).abs(), distances.amin(1), atol=1e-6, rtol=0)


@parametrised
def test_stored_tensors_read_back(grid: Grid, table: list[float]) -> None:
    """The numbers that layers go on with are those that a reader finds, to the bit."""
    fitted = grid.fitted([weight()])
    rounded = round_to_nearest(weight(), fitted)
    stored = fitted.stored(rounded.numbers, rounded.scales)
    assert torch.equal(fitted.read(stored, inputs=96), rounded.decoded())
    assert (rounded.decoded() - weight()).norm() < 0.2 * weight().norm()


@parametrised
def test_a_weight_of_zeros_stays_zero(grid: Grid, table: list[float]) -> None:
    zeros = torch.zeros(4, 96)
    fitted = grid.fitted([zeros])
    rounded = round_to_nearest(zeros, fitted)
    assert torch.equal(fitted.read(fitted.stored(rounded.numbers, rounded.scales), inputs=96), zeros)


@parametrised
def test_tiny_and_huge_weights_stay_finite(grid: Grid, table: list[float]) -> None:
    x = weight() * torch.logspace(-30, 30, 6)[:, None]
    fitted = grid.fitted([x])
    rounded = round_to_nearest(x, fitted)
    assert fitted.read(fitted.stored(rounded.numbers, rounded.scales), inputs=96).isfinite().all()


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("largest", [0.03, 0.004, 0.0005])
def test_small_rows_keep_the_precision_of_others(dtype: torch.dtype, bits: int, largest: float) -> None:
    """Their scales in float16 are below its normal numbers."""
    x = weight() / weight().abs().amax(1, keepdim=True)
    errors = []
    for size in (1.0, largest):
        decoded = round_to_nearest(x * size, IntegerGrid(bits, None, dtype)).decoded() / size
        errors.append(float((decoded - x).norm() / x.norm()))
    assert errors[1] < 1.2 * errors[0]


def test_the_layout_of_packed_integers() -> None:
    """Eight codes to a word, that of the first input lowest, plus 8."""
    numbers = torch.tensor([[-8.0, -7, 0, 7, 1, 2, -1, -2, 3, 4, 5, 6, -3, -4, -5, -6]])
    stored = IntegerGrid(4, 16, BF16).stored(numbers, torch.tensor([[0.5]]))
    words = stored["weight_packed"].numpy().view(np.uint32)
    codes = [(int(word) >> shift) & 15 for word in words[0] for shift in range(0, 32, 4)]
    assert codes == [int(number) + 8 for number in numbers[0]]
    assert stored["weight_packed"].dtype == torch.int32
    assert stored["weight_shape"].tolist() == [1, 16]
    assert stored["weight_scale"].dtype == BF16


@pytest.mark.parametrize("grid", [Mxfp4Grid(), Nvfp4Grid(global_scale=4.0)], ids=["mxfp4", "nvfp4"])
def test_the_layout_of_four_bit_floats(grid: Grid) -> None:
    """Two codes to a byte, that of the even input in the lower half; bit 3 is the sign."""
    numbers = torch.tensor([E2M1 + [-number for number in E2M1]]).repeat(1, 2)
    scales = torch.full((1, 32 // (grid.group_size or 32)), 0.5)
    stored = grid.stored(numbers, scales)
    packed = stored["weight_packed"].numpy()
    codes = np.stack((packed & 15, packed >> 4), axis=-1).reshape(-1)
    assert codes.tolist() == list(range(16)) * 2


def test_scales_of_mxfp4_are_exponents() -> None:
    stored = Mxfp4Grid().stored(torch.ones(1, 64), torch.tensor([[0.25, 8.0]]))
    assert stored["weight_scale"].tolist() == [[125, 130]]


def test_the_largest_scale_of_nvfp4_is_the_largest_e4m3() -> None:
    """And readers divide by the tensor's number."""
    x = weight()
    fitted = Nvfp4Grid().fitted([x, 3 * x])
    rounded = round_to_nearest(3 * x, fitted)
    stored = fitted.stored(rounded.numbers, rounded.scales)
    assert stored["weight_scale"].float().max() == 448.0
    assert float(stored["weight_global_scale"]) == pytest.approx(448 * 6 / float((3 * x).abs().max()))
