"""Layers computed one at a time give what the whole model gives, in every family that is served."""

from pathlib import Path

import pytest
import torch

from tandem.architecture.model import EMBEDDING
from tandem.compute.torch.kernels import TorchKernels
from tandem.core.errors import UnsupportedCheckpointError
from tandem.quantize.inputs import shared_inputs
from tandem.quantize.moments import Moments
from tandem.quantize.output_head import OutputHead
from tandem.quantize.source import SourceModel
from tandem.quantize.stream import LayerRunner
from tests.helpers import checkpoints
from tests.helpers.checkpoints import load_reference
from tests.helpers.hybrid_checkpoints import RECURRENT_BUILDERS
from tests.helpers.quantizing import random_tokens

STREAMS = "deepseek_v4"  # has several
FAMILIES = checkpoints.BUILDERS | checkpoints.EXPERT_BUILDERS | checkpoints.MORE_BUILDERS
WITH_ONE = [pytest.param(build, id=name) for name, build in FAMILIES.items() if name != STREAMS]
RECURRENT = [
    pytest.param(build, id=name, marks=() if name == "falcon_h1" else pytest.mark.slow)
    for name, build in RECURRENT_BUILDERS.items()
]


@pytest.mark.parametrize("build", [*WITH_ONE, *RECURRENT])
def test_logits_are_those_of_transformers(build: checkpoints.Builder, tmp_path: Path) -> None:
    path = build(tmp_path)
    model = SourceModel.open(path, TorchKernels())
    token_ids = random_tokens(2, model.spec.vocab_size)
    runner = LayerRunner(model.spec, TorchKernels())
    stream = runner.begin(token_ids, model.stored(EMBEDDING))
    for index in range(model.spec.num_layers):
        runner.advance(index, model.load_layer(index), stream)
    assert not stream.kept, "K and V are let go behind their last reader"
    head = OutputHead(model.spec, model.final_norm(), model.head(), TorchKernels())
    with torch.no_grad():
        wanted = load_reference(path)(token_ids).logits
    found = torch.stack([head(hidden) for hidden in stream.hidden])
    assert (found - wanted).norm() < 1e-4 * wanted.norm()


def test_a_model_of_several_streams_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpointError, match="has several residual streams, and its weights are not"):
        SourceModel.open(FAMILIES[STREAMS](tmp_path), TorchKernels())


def test_moments_are_of_the_rows_that_a_weight_is_multiplied_by(tmp_path: Path) -> None:
    """And observing changes nothing. Of `down` with a gate of silu, whose rows no other test sees."""
    model = SourceModel.open(checkpoints.save_tiny_llama(tmp_path), TorchKernels())
    runner = LayerRunner(model.spec, TorchKernels())
    stream = runner.begin(random_tokens(3, model.spec.vocab_size), model.stored(EMBEDDING))
    before, tensors = stream.hidden.clone(), model.load_layer(0)
    layer = model.spec.layers[0]
    moments = {shared.weights[0]: Moments(shared.linears[0].inputs) for shared in shared_inputs(layer)}
    runner.observe(0, tensors, stream, moments)
    assert torch.equal(stream.hidden, before)
    with torch.no_grad():
        reference = load_reference(tmp_path)
        rows: list[torch.Tensor] = []
        module = reference.get_submodule("model.layers.0.mlp.down_proj")
        module.register_forward_pre_hook(lambda _, arguments: rows.append(arguments[0].flatten(0, 1)))
        reference(stream.token_ids)
    found = moments["model.layers.0.mlp.down_proj.weight"]
    assert found.num_rows == stream.token_ids.numel()
    torch.testing.assert_close(found.second, rows[0].T @ rows[0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found.mean_absolute, rows[0].abs().mean(0), rtol=1e-3, atol=1e-5)


def test_experts_see_the_tokens_that_chose_them(tmp_path: Path) -> None:
    model = SourceModel.open(checkpoints.save_tiny_mixtral(tmp_path), TorchKernels())
    runner = LayerRunner(model.spec, TorchKernels())
    stream = runner.begin(random_tokens(4, model.spec.vocab_size), model.stored(EMBEDDING))
    layer = model.spec.layers[0]
    moments = {shared.weights[0]: Moments(shared.linears[0].inputs) for shared in shared_inputs(layer)}
    runner.observe(0, model.load_layer(0), stream, moments)
    routed = [seen.num_rows for name, seen in moments.items() if "experts" in name and "w1" in name]
    assert len(routed) == 8
    assert sum(routed) == 2 * stream.token_ids.numel(), "each token has two experts"
