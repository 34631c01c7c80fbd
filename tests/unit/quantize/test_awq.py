"""Factors are folded so that the layer computes the same, and rounding then does less harm."""

from pathlib import Path

import pytest
import torch

from tandem.architecture.model import EMBEDDING
from tandem.compute.torch.kernels import TorchKernels
from tandem.quantize.awq import scale_inputs
from tandem.quantize.grids import IntegerGrid
from tandem.quantize.inputs import shared_inputs
from tandem.quantize.moments import Moments
from tandem.quantize.rounding import output_error, round_to_nearest
from tandem.quantize.source import SourceModel
from tandem.quantize.stream import LayerRunner
from tests.helpers import checkpoints
from tests.helpers.quantizing import random_tokens

INT4 = IntegerGrid(4, 32, torch.bfloat16)
BUILDERS = {
    "llama": checkpoints.save_tiny_llama,
    "llama with one head for each": lambda path: checkpoints.save_tiny_llama(path, num_key_value_heads=4),
    "qwen2 with biases": checkpoints.save_tiny_qwen2,
    "gemma3 with offsets of norms": checkpoints.save_tiny_gemma3,
    "mixtral": checkpoints.save_tiny_mixtral,
    "gpt_oss with clamps": checkpoints.save_tiny_gpt_oss,
}


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS.keys())
def test_a_layer_computes_the_same(build: checkpoints.Builder, tmp_path: Path) -> None:
    model = SourceModel.open(build(tmp_path), TorchKernels())
    runner = LayerRunner(model.spec, TorchKernels())
    token_ids = random_tokens(4, model.spec.vocab_size)
    tensors, inputs = model.load_layer(0), shared_inputs(model.spec.layers[0])
    moments = {shared.weights[0]: Moments(shared.linears[0].inputs) for shared in inputs}
    runner.observe(0, tensors, runner.begin(token_ids, model.stored(EMBEDDING)), moments)
    scaled = dict(tensors)
    for shared in inputs:
        scale_inputs(scaled, shared, INT4, moments[shared.weights[0]])
    assert any(not torch.equal(tensors[name], scaled[name]) for name in tensors)
    plain, folded = (runner.begin(token_ids, model.stored(EMBEDDING)) for _ in range(2))
    runner.advance(0, tensors, plain)
    runner.advance(0, scaled, folded)
    assert (folded.hidden - plain.hidden).norm() < 1e-5 * plain.hidden.norm()


def test_outliers_of_inputs_are_rounded_better(tmp_path: Path) -> None:
    model = SourceModel.open(checkpoints.save_tiny_llama(tmp_path), TorchKernels())
    shared = shared_inputs(model.spec.layers[0])[1]  # of q, k and v
    x = torch.randn(300, 64, generator=torch.Generator().manual_seed(0))
    x[:, ::7] *= 30
    moments = Moments(64)
    moments.add(x)
    tensors = model.load_layer(0)
    plain = sum(_error(tensors[name], moments) for name in shared.weights)
    seen = scale_inputs(tensors, shared, INT4, moments)
    assert sum(_error(tensors[name], seen) for name in shared.weights) < 0.8 * plain


def _error(weight: torch.Tensor, moments: Moments) -> float:
    return output_error(round_to_nearest(weight, INT4).decoded() - weight, moments.second)
