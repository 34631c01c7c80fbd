"""Packed weights: the same bits from every product, and nobody but the kernels reads them."""

import operator
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tandem.compute.native.bindings import NativeKernels
from tandem.compute.ops import PackedWeight
from tandem.compute.torch.kernels import TorchKernels
from tests.helpers.native_kernels import ARCHITECTURES, load_or_skip


@pytest.fixture(scope="module", params=ARCHITECTURES)
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    return load_or_skip(request.param)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(16, 32), (48, 96), (160, 1024)])
def test_a_packed_weight_gives_the_same_bits(kernels: NativeKernels, dtype: torch.dtype, n: int, k: int) -> None:
    """For every number of rows: a few are multiplied in another way than many, and many in chunks."""
    assert kernels.can_pack((n, k), dtype)
    gate, up, bias = normal(0, n, k, dtype=dtype), normal(1, n, k, dtype=dtype), normal(2, n, dtype=dtype)
    packed, packed_up = (PackedWeight.of(kernels.pack(weight)) for weight in (gate, up))
    all_rows = normal(3, 900, k, dtype=dtype)
    linear, gated = kernels.linear(all_rows, gate, bias), kernels.gated_linear(all_rows, gate, up, "silu")
    for m in (*range(1, 30), *range(59, 62), *range(119, 122), 383, 384, 385, 900):
        assert torch.equal(kernels.linear(all_rows[:m], packed, bias), linear[:m]), m
        assert torch.equal(kernels.gated_linear(all_rows[:m], packed, packed_up, "silu"), gated[:m]), m


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


@pytest.mark.parametrize(
    "read", [lambda x: F.linear(x, x), lambda x: x[0], lambda x: x.sum(), lambda x: x.tolist(), lambda x: x.view(-1)]
)
def test_nobody_else_reads_it(kernels: NativeKernels, read: Callable[[torch.Tensor], object]) -> None:
    packed = PackedWeight.of(kernels.pack(normal(0, 16, 32)))
    assert (packed.shape, packed.dtype) == ((16, 32), torch.float32)
    with pytest.raises(TypeError, match="only the kernels that packed it"):
        read(packed)


def test_it_is_no_operand_either(kernels: NativeKernels) -> None:
    packed = PackedWeight.of(kernels.pack(normal(0, 16, 32)))
    with pytest.raises(TypeError):
        operator.matmul(packed, packed)
    with pytest.raises(TypeError):
        operator.matmul(normal(0, 16, 16), packed)
