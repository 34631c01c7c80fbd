"""Latent attention beside transformers: a prompt cut at every position, long prompts, and rows of the real size."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.architecture.state import LatentSpec
from tandem.compute.attention import Backends
from tandem.compute.latents import LatentsAsKV
from tandem.compute.native.attention import NativeBackend
from tandem.compute.native.bindings import NativeKernels
from tandem.compute.ops import Kernels
from tandem.compute.torch.kernels import TorchKernels
from tandem.models.loader import LoadedModel, load_model
from tests.golden.test_parity import (
    RELATIVE_ERROR,
    check_2000_tokens,
    check_every_cut,
    random_prompt,
    reference_logits,
    relative_error,
)
from tests.helpers import checkpoints
from tests.helpers.native_kernels import load_or_skip
from tests.helpers.stepping import REFERENCE, Stepper

FAMILIES = {
    "deepseek_v2": checkpoints.save_tiny_deepseek_v2,
    "deepseek_v3": checkpoints.save_tiny_deepseek_v3,
    "glm4_moe_lite": checkpoints.save_tiny_glm4_moe_lite,
    "mistral4": checkpoints.save_tiny_mistral4,
}
CPU = torch.device("cpu")
LONG: dict[str, Any] = {"max_position_embeddings": 4096}
REAL_ROWS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
OPTIONS: dict[str, dict[str, Any]] = {
    "half-split": {"rope_interleave": False},
    "no rope scaling": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "queries without a latent": {"q_lora_rank": None},
    "biases": {"attention_bias": True},
    "rows of 576": REAL_ROWS,
    "no dense layer, one group": {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
}


@pytest.fixture(params=["torch", "native"])
def computed_by(request: pytest.FixtureRequest) -> tuple[Kernels, Backends]:
    if request.param == "torch":
        return TorchKernels(), REFERENCE
    native: NativeKernels = load_or_skip()
    return native, {LatentSpec: LatentsAsKV(NativeBackend(CPU))}


def load(path: Path, kernels: Kernels) -> LoadedModel:
    return load_model(str(path), device=CPU, kernels=kernels)


@pytest.mark.parametrize("family", checkpoints.family_params(FAMILIES))
def test_a_prompt_cut_at_every_position(family: str, computed_by: tuple[Kernels, Backends], tmp_path: Path) -> None:
    kernels, backends = computed_by
    path, prompt = FAMILIES[family](tmp_path), random_prompt(30)
    expected = reference_logits(checkpoints.load_reference(path), prompt)
    model = load(path, kernels)
    check_every_cut(lambda: Stepper(model.decoder, backends, num_tokens=len(prompt)), prompt, expected)


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_deepseek_v3(option: str, computed_by: tuple[Kernels, Backends], tmp_path: Path) -> None:
    kernels, backends = computed_by
    path, prompt = checkpoints.save_tiny_deepseek_v3(tmp_path, **OPTIONS[option]), random_prompt(40)
    expected = reference_logits(checkpoints.load_reference(path), prompt)
    stepper = Stepper(load(path, kernels).decoder, backends, num_tokens=len(prompt))
    logits = torch.cat((stepper.step(prompt[:39]), stepper.step(prompt[39:])))
    assert relative_error(logits, expected) < RELATIVE_ERROR


def test_groups_of_experts_that_count_by_their_best(computed_by: tuple[Kernels, Backends], tmp_path: Path) -> None:
    kernels, backends = computed_by
    grouped: dict[str, Any] = {
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 16.0,
    }
    path, prompt = checkpoints.save_tiny_deepseek_v2(tmp_path, q_lora_rank=24, **grouped), random_prompt(40)
    expected = reference_logits(checkpoints.load_reference(path), prompt)
    logits = Stepper(load(path, kernels).decoder, backends, num_tokens=40).step(prompt)
    assert relative_error(logits, expected) < RELATIVE_ERROR


@pytest.mark.parametrize("family", checkpoints.family_params(FAMILIES))
def test_errors_do_not_grow_over_2000_tokens(
    family: str, computed_by: tuple[Kernels, Backends], tmp_path: Path
) -> None:
    kernels, backends = computed_by
    path = FAMILIES[family](tmp_path, **LONG)
    check_2000_tokens(path, lambda: Stepper(load(path, kernels).decoder, backends, num_tokens=2000))
