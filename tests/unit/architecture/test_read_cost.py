import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tandem.architecture.cost import read_cost
from tandem.core.errors import CheckpointError, CorruptCheckpointError, UnsupportedCheckpointError
from tests.helpers.specs import attention_of

DEMO = Path(__file__).parents[3] / "demo" / "tandem-demo"
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "eos_token_id": 1,
}
SLIDING = {"sliding_window": 64, "use_sliding_window": True}


def test_a_multimodal_gemma_that_leaves_sizes_out_has_its_family_s() -> None:
    """Published files of gemma-3-4b-it have only these sizes."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    shape = read_cost({"model_type": "gemma3", "text_config": text}, "x")
    assert shape.num_parameters / 1e9 == pytest.approx(3.88, rel=0.005)
    mixers = attention_of(shape.model)
    assert (mixers[0].num_kv_heads, mixers[0].head_dim, shape.tied) == (4, 256, True)
    assert [mixer.window for mixer in mixers].count(None) == 5


def test_the_demo_model_counts_as_its_file_does() -> None:
    """Weights of the file without norms, which planning leaves out; KV as one layer of the engine stores it."""
    shape = read_cost(json.loads((DEMO / "config.json").read_text()), "demo")
    with safe_open(DEMO / "model.safetensors", framework="numpy") as file:
        slices = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    matrices = [sizes[0] * sizes[1] for sizes in slices.values() if len(sizes) == 2]
    assert shape.num_parameters == sum(matrices)


def test_layers_with_and_without_experts_are_counted_each() -> None:
    """Experts in every second layer of 8; the other layers have a block of the usual size."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = SIZES | {"model_type": "qwen3_moe", "decoder_sparse_step": 2, "head_dim": 32} | experts
    cost = read_cost(config, "x")
    assert cost.num_expert_parameters == 4 * 4 * 3 * 256 * 32
    attention = 8 * 2 * 256 * 32 * (8 + 2)
    dense, routers = 4 * 3 * 256 * 512, 4 * 4 * 256
    assert cost.num_parameters == attention + dense + routers + cost.num_expert_parameters + 2 * 256 * 1000
    assert cost.num_multiplied_parameters == attention + dense + routers + cost.num_expert_parameters // 2


def _without(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda config: config.pop(key)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda c: c.update(model_type="deepseek_v9"), UnsupportedCheckpointError, "model_type='deepseek_v9' is not"),
        (_without("model_type"), CorruptCheckpointError, "neither architectures nor model_type"),
        (_without("hidden_size"), CorruptCheckpointError, "hidden_size must be an integer"),
        (lambda c: c.update(hidden_size="4096"), CorruptCheckpointError, "hidden_size must be an integer"),
        (lambda c: c.update(num_attention_heads=6), CorruptCheckpointError, "a divisor of hidden_size=256"),
        (lambda c: c.update(num_key_value_heads=9), CorruptCheckpointError, "num_key_value_heads must be"),
        (lambda c: c.update(model_type="gemma3"), CorruptCheckpointError, "text_config must be an object"),
        (
            lambda c: c.update(model_type="qwen3", layer_types=["full_attention"], **SLIDING),
            CorruptCheckpointError,
            "layer_types must be a list of num_hidden_layers=8 entries",
        ),
        (
            lambda c: c.update(model_type="mixtral", num_local_experts=4, num_experts_per_tok=5),
            CorruptCheckpointError,
            "num_experts_per_tok must be",
        ),
    ],
)
def test_what_cannot_be_counted_is_refused(
    change: Callable[[dict[str, Any]], None], error: type[CheckpointError], words: str
) -> None:
    config = SIZES | {"model_type": "llama"}
    change(config)
    with pytest.raises(error) as caught:
        read_cost(config, "x")
    assert words in str(caught.value)
