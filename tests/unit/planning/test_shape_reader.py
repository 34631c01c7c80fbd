import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tandem.core.errors import CheckpointError, CorruptCheckpointError, UnsupportedCheckpointError
from tandem.models.fields import Fields
from tandem.models.registry import find_family
from tandem.planning.shape_reader import read_shape

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
SERVED: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama with a head size": {"model_type": "llama", "head_dim": 64},
    "llama, every head its own": {"model_type": "llama", "num_key_value_heads": None},
    "mistral": {"model_type": "mistral"},
    "mistral with a window": {"model_type": "mistral", "sliding_window": 100},
    "mistral without": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "sliding_window": 64},
    "qwen2 upper layers": {"model_type": "qwen2", "max_window_layers": 5, **SLIDING},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3 layer types": {
        "model_type": "qwen3",
        "layer_types": ["full_attention", "sliding_attention"] * 4,
        **SLIDING,
    },
    "gemma3 text": {"model_type": "gemma3_text"},
    "gemma3 text, older": {"model_type": "gemma3_text", "sliding_window_pattern": 3, "sliding_window": 77},
}


@pytest.mark.parametrize("config", [pytest.param(SIZES | own, id=name) for name, own in SERVED.items()])
def test_sizes_and_windows_are_those_that_are_served(config: dict[str, Any]) -> None:
    served = find_family(Fields(config, "config.json")).read_config(Fields(config, "config.json"))
    shape = read_shape(config, "x")
    assert shape.windows == tuple(layer.window for layer in served.layers)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (
        served.num_heads,
        served.num_kv_heads,
        served.head_dim,
    )
    assert (shape.hidden_size, shape.tied, shape.max_tokens) == (
        served.hidden_size,
        served.tie_word_embeddings,
        served.max_position_embeddings,
    )
    assert shape.kv_layer_bytes == 2 * served.num_kv_heads * served.head_dim * 2
    assert shape.num_table_parameters == served.hidden_size * served.vocab_size


def test_a_multimodal_gemma_that_leaves_sizes_out_has_its_family_s() -> None:
    """Published files of gemma-3-4b-it have only these sizes."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    shape = read_shape({"model_type": "gemma3", "text_config": text}, "x")
    assert shape.num_parameters / 1e9 == pytest.approx(3.88, rel=0.005)
    assert (shape.num_kv_heads, shape.head_dim, shape.num_full_layers, shape.tied) == (4, 256, 5, True)


def test_the_demo_model_counts_as_its_file_does() -> None:
    """Weights of the file without norms, which planning leaves out; KV as one layer of the engine stores it."""
    shape = read_shape(json.loads((DEMO / "config.json").read_text()), "demo")
    with safe_open(DEMO / "model.safetensors", framework="numpy") as file:
        slices = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    matrices = [sizes[0] * sizes[1] for sizes in slices.values() if len(sizes) == 2]
    assert shape.num_parameters == sum(matrices)


def _without(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda config: config.pop(key)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda c: c.update(model_type="deepseek_v3"), UnsupportedCheckpointError, 'model_type="deepseek_v3" is not'),
        (_without("model_type"), UnsupportedCheckpointError, "model_type=null"),
        (_without("hidden_size"), CorruptCheckpointError, "hidden_size must be an integer"),
        (lambda c: c.update(hidden_size="4096"), CorruptCheckpointError, "hidden_size must be an integer"),
        (lambda c: c.update(num_attention_heads=7), CorruptCheckpointError, "a divisor of hidden_size=256"),
        (lambda c: c.update(num_key_value_heads=9), CorruptCheckpointError, "num_key_value_heads must be"),
        (lambda c: c.update(model_type="gemma3"), CorruptCheckpointError, "text_config must be an object"),
        (
            lambda c: c.update(model_type="qwen3", layer_types=["full_attention"], **SLIDING),
            CorruptCheckpointError,
            "layer_types must be 8 of",
        ),
        (
            lambda c: c.update(model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, decoder_sparse_step=2),
            UnsupportedCheckpointError,
            "layers with and without experts",
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
        read_shape(config, "x")
    assert words in str(caught.value)
