"""The real shapes and what a step of them costs at least, against numbers worked out by hand."""

import pytest
import torch

from bench.gpu.models import FIELDS, RandomModel, fields_of, random_model, spec_of
from bench.gpu.setting import Setting

PARAMETERS = {"qwen3-8b": 8_190_735_360, "llama-3.1-8b": 8_030_261_248}
KV_BYTES = {"qwen3-8b": 147_456, "llama-3.1-8b": 131_072}


def unfilled(name: str) -> RandomModel:
    """Of the real shape, without memory."""
    spec = spec_of(fields_of(name, is_dry=False), 4096, "bfloat16", "")
    tensors = {tensor.name: torch.empty(tensor.shape, dtype=torch.bfloat16, device="meta") for tensor in spec.tensors()}
    return RandomModel(name, spec, tensors)


@pytest.mark.parametrize("name", FIELDS)
def test_real_shapes(name: str) -> None:
    model = unfilled(name)
    assert sum(tensor.numel() for tensor in model.parameters.values()) == PARAMETERS[name]
    assert model.kv_bytes_per_token == KV_BYTES[name]
    embedding = model.spec.vocab_size * model.spec.hidden_size
    assert model.read_bytes == 2 * (PARAMETERS[name] - embedding)


def test_flops_of_a_prompt() -> None:
    """Two a weight and token, but for the embedding; the head once; causal attention's half of the square. The last
    layer computes K and V of all tokens and everything else of one.
    """
    model = unfilled("llama-3.1-8b")
    head = 128256 * 4096
    norms = (2 * 32 + 1) * 4096
    linear = PARAMETERS["llama-3.1-8b"] - 2 * head - norms
    attention = 32 * 2 * (2 * 32 * 128) * 1000 * 1000 / 2
    unasked = linear / 32 - 2 * 4096 * 1024
    unasked_attention = 2 * (2 * 32 * 128) * 999 * 999 / 2
    expected = 2 * linear * 1000 + 2 * head + attention - 2 * unasked * 999 - unasked_attention
    assert model.prefill_flops(1000) == expected


def test_the_same_weights_every_time() -> None:
    first, second = (random_model(Setting(is_dry=True), "qwen3-8b", 64) for _ in range(2))
    assert all(torch.equal(tensor, second.parameters[key]) for key, tensor in first.parameters.items())
    assert first.parameters["model.embed_tokens.weight"].std() > 0
