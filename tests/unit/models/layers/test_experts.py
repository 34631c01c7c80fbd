"""A token's way through a mixture of experts does not depend on the tokens beside it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.architecture.feed_forward import FeedForwardSpec, MixtureOfExpertsSpec, ParallelSpec
from tandem.compute.native.bindings import NativeKernels
from tandem.core.errors import CheckpointError
from tandem.models.layers.experts import compile_experts
from tandem.models.layers.router import compile_choice
from tandem.models.loader import load_model
from tests.helpers import checkpoints
from tests.helpers.native_kernels import load_or_skip

FAMILIES = ("mixtral", "qwen3_moe", "qwen2_moe", "glm4_moe", "minimax_m2", "gpt_oss", "gemma4_moe", "deepseek_v4")
NUM_TOKENS = 37


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    return load_or_skip()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_alone_and_batched_are_the_same_bits(family: str, dtype: str, kernels: NativeKernels, tmp_path: Path) -> None:
    """Regression: PyTorch's sigmoid has other last bits at the end of a tensor, so scores depended on the batch."""
    build = (checkpoints.BUILDERS | checkpoints.EXPERT_BUILDERS)[family]
    model = load_model(str(build(tmp_path)), dtype=dtype, device=torch.device("cpu"), kernels=kernels)
    x = torch.randn(NUM_TOKENS, model.spec.hidden_size, generator=torch.Generator().manual_seed(0))
    x, ids = x.to(getattr(torch, dtype)), torch.arange(6, 6 + NUM_TOKENS)
    for layer in model.decoder._layers:
        assert layer._feed_forward is not None
        alone = torch.cat([layer._feed_forward(x[i : i + 1], ids[i : i + 1]) for i in range(NUM_TOKENS)])
        for count in range(2, NUM_TOKENS + 1):
            assert torch.equal(layer._feed_forward(x[:count], ids[:count]), alone[:count]), count


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_one_call_for_its_experts_and_one_for_their_choice(
    family: str, dtype: str, kernels: NativeKernels, tmp_path: Path
) -> None:
    build = (checkpoints.BUILDERS | checkpoints.EXPERT_BUILDERS)[family]
    model = load_model(str(build(tmp_path)), dtype=dtype, device=torch.device("cpu"), kernels=kernels)
    mixtures = [
        mixture for layer in model.spec.layers if layer.feed_forward for mixture in _mixtures(layer.feed_forward)
    ]
    weights = model.decoder.parameters
    assert mixtures
    for mixture in mixtures:
        assert compile_experts(mixture.experts, weights) is not None
        is_by_token = mixture.router.table is not None
        assert (compile_choice(mixture.router, weights, kernels) is None) == is_by_token


def _mixtures(block: FeedForwardSpec) -> Iterator[MixtureOfExpertsSpec]:
    if isinstance(block, MixtureOfExpertsSpec):
        yield block
    if isinstance(block, ParallelSpec):
        for branch in block.branches:
            yield from _mixtures(branch.block)


@pytest.mark.parametrize(
    "changes",
    [{"n_group": 8}, {"n_group": 3}, {"topk_group": 5}, {"num_experts_per_tok": 9}, {"num_experts_per_tok": 5}],
)
def test_routers_that_cannot_choose_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    """Of eight experts in four groups, two of them used: what cannot be chosen from was an error while serving."""
    path = checkpoints.edit_config(checkpoints.save_tiny_glm4_moe(tmp_path), **changes)
    with pytest.raises(CheckpointError, match=next(iter(changes))):
        load_model(str(path), device=torch.device("cpu"), kernels=load_or_skip())
