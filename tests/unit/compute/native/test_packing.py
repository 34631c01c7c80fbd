"""Packed matrices: the same bits from every product."""

import subprocess
import sys

import pytest
import torch

from tandem.compute.native.bindings import NativeKernels
from tandem.compute.order import Order
from tandem.compute.torch.kernels import TorchKernels
from tests.helpers.native_kernels import ARCHITECTURES, load_or_skip
from tests.helpers.numbers import normal


@pytest.fixture(scope="module", params=ARCHITECTURES)
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    return load_or_skip(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(16, 32), (48, 96), (160, 1024)])
def test_a_packed_weight_gives_the_same_bits(kernels: NativeKernels, dtype: torch.dtype, n: int, k: int) -> None:
    """For every number of rows: a few are multiplied in another way than many, and many in chunks."""
    assert kernels.can_pack((n, k), dtype)
    gate, up, bias = normal(0, n, k, dtype=dtype), normal(1, n, k, dtype=dtype), normal(2, n, dtype=dtype)
    packed, packed_up = (kernels.pack(weight) for weight in (gate, up))
    all_rows = normal(3, 900, k, dtype=dtype)
    linear, gated = kernels.linear(all_rows, gate, bias), kernels.gated_linear(all_rows, gate, up, "silu")
    for m in (*range(1, 30), *range(59, 62), *range(119, 122), 383, 384, 385, 900):
        assert torch.equal(kernels.linear(all_rows[:m], packed, bias, order=Order.STRIPS), linear[:m]), m
        product = kernels.gated_linear(all_rows[:m], packed, packed_up, "silu", order=Order.STRIPS)
        assert torch.equal(product, gated[:m]), m


def test_packing_moves_elements_and_changes_none(kernels: NativeKernels) -> None:
    weight = normal(0, 64, 96)
    packed = kernels.pack(weight)
    assert not torch.equal(packed, weight)
    for strip in range(0, 64, 16):
        assert torch.equal(packed[strip : strip + 16].flatten().view(96, 16).T, weight[strip : strip + 16])


def test_packing_without_assertions_is_the_same() -> None:
    load_or_skip()
    code = """
import sys, torch
from tandem.compute.native.bindings import load
weight = torch.arange(64.0 * 96).view(64, 96)
packed = load().pack(weight)
strips = [packed[at : at + 16].flatten().view(96, 16).T for at in range(0, 64, 16)]
sys.exit(not torch.equal(torch.cat(strips), weight))
"""
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("shape", [(15, 32), (16, 1), (3, 16, 32), (16,)])
def test_a_weight_that_would_not_keep_its_size_is_not_packed(kernels: NativeKernels, shape: tuple[int, ...]) -> None:
    assert kernels.can_pack((16, 32), torch.float32)
    assert not kernels.can_pack(shape, torch.float32)
    assert not kernels.can_pack((16, 32), torch.float16)
    assert not TorchKernels().can_pack((16, 32), torch.float32)
