"""The feed-forward block of a token does not depend on the tokens beside it."""

import pytest
import torch

from tandem.architecture.feed_forward import Activation, GatedSpec
from tandem.architecture.tensors import LinearSpec
from tandem.compute.native.bindings import NativeKernels
from tandem.models.layers.mlp import GatedMLP
from tests.helpers.native_kernels import load_or_skip

HIDDEN, FFN = 48, 1003


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    return load_or_skip()


@pytest.mark.parametrize("num_threads", [3, 7])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_biases_alone_and_batched_are_the_same_bits(
    kernels: NativeKernels, dtype: torch.dtype, activation: Activation, num_threads: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, rows, columns in (("gate_proj", FFN, HIDDEN), ("up_proj", FFN, HIDDEN), ("down_proj", HIDDEN, FFN)):
        weights[f"mlp.{name}.weight"] = torch.randn(rows, columns, generator=generator).to(dtype)
        weights[f"mlp.{name}.bias"] = torch.randn(rows, generator=generator).to(dtype)
    spec = GatedSpec(
        gate=LinearSpec("mlp.gate_proj", FFN, HIDDEN, bias=True),
        up=LinearSpec("mlp.up_proj", FFN, HIDDEN, bias=True),
        down=LinearSpec("mlp.down_proj", HIDDEN, FFN, bias=True),
        activation=activation,
    )
    mlp = GatedMLP(spec, weights, kernels)
    x = torch.randn(120, HIDDEN, generator=generator).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        alone = torch.cat([mlp(row[None]) for row in x])
        for m in range(2, len(x) + 1):
            assert torch.equal(mlp(x[:m]), alone[:m]), m
    finally:
        torch.set_num_threads(before)
