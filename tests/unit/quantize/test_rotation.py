"""A rotated model computes what the model computes; models that cannot be rotated are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.architecture.mixers import AttentionSpec
from tandem.architecture.model import EMBEDDING
from tandem.compute.torch.kernels import TorchKernels
from tandem.core.errors import ConfigurationError
from tandem.quantize.output_head import OutputHead
from tandem.quantize.rotation import MergedRotation, neutral
from tandem.quantize.source import SourceModel
from tandem.quantize.stream import LayerRunner
from tests.helpers import checkpoints
from tests.helpers.quantizing import random_tokens

LATENT = {"deepseek_v4", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "mistral4"}
BUILDERS = {
    name: build
    for name, build in (checkpoints.BUILDERS | checkpoints.EXPERT_BUILDERS | checkpoints.MORE_BUILDERS).items()
    if name not in {"gemma2", "gemma3", "gemma4", "gemma4_moe", "olmo2", "olmo3"} | LATENT
}
BUILDERS["llama with biases"] = lambda path: checkpoints.save_tiny_llama(path, attention_bias=True, mlp_bias=True)


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS.keys())
def test_a_rotated_model_computes_the_same(build: checkpoints.Builder, tmp_path: Path) -> None:
    model = SourceModel.open(build(tmp_path), TorchKernels())
    rotation = MergedRotation.of(model.spec)
    runner = LayerRunner(model.spec, TorchKernels())
    token_ids, embedding = random_tokens(2, model.spec.vocab_size), model.stored(EMBEDDING)
    plain, turned = runner.begin(token_ids, embedding), runner.begin(token_ids, rotation.rotate_embedding(embedding))
    for index, layer in enumerate(model.spec.layers):
        tensors = model.load_layer(index)
        runner.advance(index, tensors, plain)
        before = dict(tensors)
        rotation.rotate_layer(layer, tensors)
        assert isinstance(layer.mixer, AttentionSpec)
        assert not torch.equal(tensors[f"{layer.mixer.q.name}.weight"], before[f"{layer.mixer.q.name}.weight"])
        runner.advance(index, tensors, turned)
    assert (rotation.rotate_back(turned.hidden) - plain.hidden).norm() < 1e-4 * plain.hidden.norm()
    norm, weight = model.spec.final_norm, model.final_norm()
    head = OutputHead(model.spec, weight, model.head(), TorchKernels())
    turned_head = OutputHead(
        model.spec, neutral(norm), rotation.rotate_head(model.head().float(), norm, weight), TorchKernels()
    )
    wanted = head(plain.hidden[0])
    assert (turned_head(turned.hidden[0]) - wanted).norm() < 1e-4 * wanted.norm()


@pytest.mark.parametrize(
    "build",
    [
        checkpoints.save_tiny_gemma3,
        checkpoints.save_tiny_gemma4,
        checkpoints.save_tiny_olmo2,
        checkpoints.save_tiny_deepseek_v3,
    ],
)
def test_norms_behind_blocks_and_latents_do_not_turn(build: checkpoints.Builder, tmp_path: Path) -> None:
    model = SourceModel.open(build(tmp_path), TorchKernels())
    with pytest.raises(ConfigurationError, match=r"--rotate: layer 0 of the model .*leave --rotate out"):
        MergedRotation.of(model.spec)


def test_a_size_without_a_hadamard_matrix_is_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"hidden_size": 72, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 18}
    model = SourceModel.open(checkpoints.save_tiny_llama(tmp_path, **options), TorchKernels())
    with pytest.raises(ConfigurationError, match="no Hadamard matrix of 18 rows"):
        MergedRotation.of(model.spec)
