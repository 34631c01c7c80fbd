"""Hyper-connections against those of transformers' DeepSeek-V4, and the bits of a token among others."""

import pytest
import torch
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

from tandem.architecture.families.streams import StreamSizes
from tandem.architecture.residual import HyperConnectionSpec, StreamsSpec
from tandem.architecture.tensors import NormSpec
from tandem.compute.ops import Kernels
from tandem.compute.torch.kernels import TorchKernels
from tandem.models.layers.hyper_connections import HyperConnection, ManyStreams
from tandem.models.layers.norm import Norm
from tandem.models.parameters import Parameters
from tests.helpers.native_kernels import load_or_skip
from tests.helpers.numbers import normal
from tests.helpers.parameters import dense_parameters

HIDDEN, STREAMS, NUM_TOKENS = 48, 4, 21
SIZES = StreamSizes(hidden=HIDDEN, num_streams=STREAMS, iterations=20, eps=1e-6, norm_eps=1e-5)
CONNECTION, ENDS = SIZES.connection("hc"), SIZES.ends()
NORM = NormSpec("norm", HIDDEN, 1e-5)


@pytest.fixture(scope="module", params=["native", "torch"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return load_or_skip() if request.param == "native" else TorchKernels()


def config() -> DeepseekV4Config:
    return DeepseekV4Config(
        hidden_size=HIDDEN, hc_mult=STREAMS, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-5, num_hidden_layers=1
    )


def filled(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Random parameters, which the module has then."""
    with torch.no_grad():
        for seed, tensor in enumerate(module.parameters()):
            tensor.copy_(normal(seed, *tensor.shape) * 0.4)
    return {name: tensor.detach() for name, tensor in module.named_parameters()}


def parameters_of(
    spec: HyperConnectionSpec | StreamsSpec, tensors: dict[str, torch.Tensor], prefix: str, kernels: Kernels
) -> Parameters:
    """`tensors`: by their names behind `prefix`."""
    weights = spec.weights
    stored = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
    source = weights.linear.weight_source
    assert source is not None
    return dense_parameters(
        {
            f"{weights.linear.name}.weight": stored[source.tensor],
            weights.scales.name: stored[weights.scales.name],
            weights.biases.name: stored[weights.biases.name],
            "norm.weight": 1 + 0.1 * normal(9, HIDDEN),
        },
        kernels,
    )


def a_connection(kernels: Kernels) -> tuple[HyperConnection, Norm, theirs.DeepseekV4HyperConnection]:
    module = theirs.DeepseekV4HyperConnection(config())
    parameters = parameters_of(CONNECTION, filled(module), "hc.", kernels)
    return HyperConnection(CONNECTION, parameters, kernels), Norm.take(NORM, parameters, kernels), module


def test_a_block_reads_and_writes_as_in_transformers(kernels: Kernels) -> None:
    ours, norm, module = a_connection(kernels)
    stream, y = normal(20, NUM_TOKENS, STREAMS * HIDDEN), normal(21, NUM_TOKENS, HIDDEN)
    with torch.no_grad():
        streams = stream.view(1, NUM_TOKENS, STREAMS, HIDDEN)
        post, comb, collapsed = module(streams)
        expected = post.unsqueeze(-1) * y.unsqueeze(-2) + comb.transpose(-1, -2) @ streams
    x, kept_stream, kept = ours.read(None, stream.clone(), None)
    torch.testing.assert_close(x, collapsed[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.read(norm, stream.clone(), None)[0], norm(x), rtol=0, atol=0)
    written, left = ours.write(kept_stream, y.clone(), kept)
    torch.testing.assert_close(written, expected[0].flatten(1), rtol=1e-5, atol=1e-5)
    assert left is None


def test_streams_begin_as_copies_and_end_as_in_transformers(kernels: Kernels) -> None:
    module = theirs.DeepseekV4HyperHead(config())
    parameters = parameters_of(ENDS, filled(module), "model.hc_head.", kernels)
    ours, norm = ManyStreams(ENDS, parameters, kernels, has_end=True), Norm.take(NORM, parameters, kernels)
    hidden, stream = normal(22, NUM_TOKENS, HIDDEN), normal(23, NUM_TOKENS, STREAMS * HIDDEN)
    assert torch.equal(ours.begin(hidden).view(NUM_TOKENS, STREAMS, HIDDEN), hidden[:, None].expand(-1, STREAMS, -1))
    with torch.no_grad():
        expected = module(stream.view(1, NUM_TOKENS, STREAMS, HIDDEN))[0]
    torch.testing.assert_close(ours.end(norm, stream, None), norm(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_alone(dtype: torch.dtype) -> None:
    kernels = load_or_skip()
    ours, norm, _ = a_connection(kernels)
    norm = Norm(norm.weight.to(dtype), norm.spec, kernels)
    stream = normal(30, 67, STREAMS * HIDDEN, dtype=dtype)
    y = normal(31, 67, HIDDEN, dtype=dtype)

    def passed(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        x, own, kept = ours.read(norm, stream[rows].clone(), None)
        return x, ours.write(own, y[rows].clone(), kept)[0]

    whole = passed(slice(0, 67))
    assert {each.dtype for each in whole} == {dtype}
    for start, stop in [(0, 1), (5, 6), (66, 67), (3, 40), (17, 34)]:
        part = passed(slice(start, stop))
        assert all(torch.equal(own, all_of[start:stop]) for own, all_of in zip(part, whole, strict=True))
