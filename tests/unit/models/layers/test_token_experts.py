"""Mixtures of DeepSeek-V4 against those of transformers: experts by the token or by score, clamped activations."""

from typing import Any

import pytest
import torch
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

from tandem.architecture.families.base import Defaults, read_sizes
from tandem.architecture.families.token_experts import read_blocks
from tandem.architecture.feed_forward import MixtureOfExpertsSpec
from tandem.architecture.fields import Fields
from tandem.compute.ops import Kernels
from tandem.compute.torch.kernels import TorchKernels
from tandem.core.errors import CorruptCheckpointError, UnsupportedCheckpointError
from tandem.models.layers.experts import MixtureOfExperts
from tandem.models.layers.sigmoid import rowwise_softplus
from tandem.models.parameters import Parameters
from tests.helpers.native_kernels import load_or_skip
from tests.helpers.numbers import normal
from tests.helpers.parameters import dense_parameters

HIDDEN, WIDTH, EXPERTS, TOP_K, VOCAB, NUM_TOKENS = 48, 24, 8, 3, 50, 37
CONFIG: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "num_hash_layers": 1,
    "swiglu_limit": 0.8,
}


@pytest.fixture(scope="module", params=["native", "torch"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return load_or_skip() if request.param == "native" else TorchKernels()


def read(**changes: object) -> list[MixtureOfExpertsSpec]:
    fields = Fields(CONFIG | changes, "config.json")
    return read_blocks(fields, read_sizes(fields, Defaults(max_positions=64, eos_token_id=1)))


def theirs_of(layer: int) -> Any:
    """A mixture with random parameters and table."""
    module: Any = theirs.DeepseekV4SparseMoeBlock(DeepseekV4Config(**CONFIG), layer)
    with torch.no_grad():
        for seed, tensor in enumerate(module.parameters()):
            tensor.copy_(normal(seed, *tensor.shape) * 0.4)
        if layer == 0:
            module.gate.tid2eid.copy_(normal(70, VOCAB, EXPERTS).argsort(1)[:, :TOP_K])
        else:
            module.gate.e_score_correction_bias.copy_(normal(71, EXPERTS) * 0.5)
    return module


def parameters_of(module: Any, layer: int, kernels: Kernels) -> Parameters:
    prefix = f"model.layers.{layer}.mlp"
    found = {f"{prefix}.{name}": tensor.detach() for name, tensor in module.state_dict().items()}
    gates, downs = found.pop(f"{prefix}.experts.gate_up_proj"), found.pop(f"{prefix}.experts.down_proj")
    for expert in range(EXPERTS):
        gate, up = gates[expert].chunk(2)
        parts = {"gate_proj": gate.contiguous(), "up_proj": up.contiguous(), "down_proj": downs[expert].contiguous()}
        found |= {f"{prefix}.experts.{expert}.{name}.weight": part for name, part in parts.items()}
    return dense_parameters(found, kernels)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_mixture_gives_what_transformers_does(layer: int, kernels: Kernels) -> None:
    module = theirs_of(layer)
    ours = MixtureOfExperts(read()[layer], parameters_of(module, layer, kernels), kernels)
    x, ids = normal(72, NUM_TOKENS, HIDDEN), torch.arange(NUM_TOKENS) * 7 % VOCAB
    with torch.no_grad():
        expected = module(x.unsqueeze(0), input_ids=ids.unsqueeze(0))[0]
    torch.testing.assert_close(ours(x, ids), expected, rtol=1e-5, atol=1e-5)


def test_tokens_go_by_their_ids_alone(kernels: Kernels) -> None:
    """In any order and beside any others, with the same bits under the compiled kernels."""
    module = theirs_of(0)
    ours = MixtureOfExperts(read()[0], parameters_of(module, 0, kernels), kernels)
    x, ids = normal(73, NUM_TOKENS, HIDDEN), torch.arange(NUM_TOKENS) * 11 % VOCAB
    chosen = ours._router(x, ids)[1]
    assert torch.equal(chosen, module.gate.tid2eid[ids])
    if not isinstance(kernels, TorchKernels):
        alone = torch.cat([ours(x[row : row + 1], ids[row : row + 1]) for row in range(NUM_TOKENS)])
        assert torch.equal(alone, ours(x, ids))


@pytest.mark.parametrize("wrong", [-1, EXPERTS])
def test_a_table_with_experts_that_there_are_not_is_refused(wrong: int) -> None:
    kernels, module = TorchKernels(), theirs_of(0)
    module.gate.tid2eid[5, 1] = wrong
    with pytest.raises(CorruptCheckpointError, match=r"model\.layers\.0\.mlp\.gate\.tid2eid has experts from"):
        MixtureOfExperts(read()[0], parameters_of(module, 0, kernels), kernels)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scoring_func", "softmax"),
        ("norm_topk_prob", False),
        ("topk_method", "greedy"),
        ("n_shared_experts", 2),
        ("mlp_layer_types", ["moe", "dense"]),
    ],
)
def test_what_transformers_does_not_compute_is_refused(name: str, value: object) -> None:
    with pytest.raises(UnsupportedCheckpointError, match=name):
        read(**{name: value})


def test_layers_that_go_by_the_token_are_the_first_or_those_that_are_named() -> None:
    assert [block.router.table is not None for block in read(num_hash_layers=1)] == [True, False]
    assert [block.router.table is not None for block in read(mlp_layer_types=["moe", "hash_moe"])] == [False, True]
    by_token, by_score = (block.router for block in read())
    assert by_token.correction is None
    assert by_score.correction is not None


def test_softplus_keeps_small_numbers_and_its_bits() -> None:
    x = torch.cat((normal(1, 1003) * 20, torch.tensor([-80.0, -30.0, 0.0, 19.9, 20.1, 88.0])))
    found = rowwise_softplus(x)
    torch.testing.assert_close(found.double(), torch.nn.functional.softplus(x.double()), rtol=2e-7, atol=4e-16)
    assert all(torch.equal(rowwise_softplus(x[:count]), found[:count]) for count in (1, 5, 17, 800))
