"""Published configurations are read as they are: sizes, cost, and which of their keys are reported."""

import json
import logging
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tandem.architecture.cost import ModelCost
from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec
from tandem.architecture.registry import find_family, supported_architectures
from tandem.cli.model_cost import named_model
from tandem.core.errors import UnsupportedCheckpointError
from tests.helpers.sparse_checkpoints import OWN_ARCHITECTURES
from tests.unit.architecture.published import CHECKPOINTS

BY_NAME = {checkpoint.name: checkpoint for checkpoint in CHECKPOINTS}
READ = {name: checkpoint for name, checkpoint in BY_NAME.items() if checkpoint.refused is None}
MIXTURES = [name for name, checkpoint in READ.items() if checkpoint.active is not None]
REFUSED = [name for name, checkpoint in BY_NAME.items() if checkpoint.refused is not None]
PRECISION = 0.006
ROUNDED = 0.02


def read(config: Any) -> ModelSpec:
    fields = Fields(config, "config.json")
    return find_family(fields).read_model(fields)


@dataclass(frozen=True)
class Reading:
    """Figures of a configuration that tests compare, cached because reading it takes up to a second."""

    num_parameters: int
    num_multiplied: int
    num_of_tables: int
    kv_bytes_per_token: float
    warned: frozenset[str]


@cache
def reading(name: str) -> Reading:
    """Of the configuration of that name."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append  # type: ignore[method-assign, assignment]
    logger = logging.getLogger("tandem")
    logger.addHandler(handler)
    try:
        spec = read(READ[name].config)
    finally:
        logger.removeHandler(handler)
    items = [str(record.args[1]) for record in records if isinstance(record.args, tuple)]
    cost = ModelCost(name, spec)
    return Reading(
        num_parameters=sum(tensor.size for tensor in spec.tensors()),
        num_multiplied=cost.num_multiplied_parameters,
        num_of_tables=cost.num_table_parameters,
        kv_bytes_per_token=cost.kv_bytes_per_token,
        warned=frozenset(re.findall(r"(?:^|, )([^=, ]+)=", ", ".join(items))),
    )


def test_each_name_is_there_once() -> None:
    assert len(BY_NAME) == len(CHECKPOINTS) >= 40


def test_every_architecture_that_is_served_has_one() -> None:
    """But those that nobody published; MiniMax-M3 is published inside a multimodal model only."""
    seen = {name for checkpoint in CHECKPOINTS for name in checkpoint.config["architectures"]}
    assert seen == set(supported_architectures()) - OWN_ARCHITECTURES.keys() - {"MiniMaxM3VLForCausalLM"}


@pytest.mark.parametrize("name", READ)
def test_parameters_are_as_many_as_published(name: str) -> None:
    checkpoint = READ[name]
    count = reading(name).num_parameters
    assert count == pytest.approx(checkpoint.total, rel=PRECISION)
    if checkpoint.is_count:
        assert count == checkpoint.total


@pytest.mark.parametrize("name", MIXTURES)
def test_active_parameters_are_as_published(name: str) -> None:
    """Publishers count no, one or both tables of tokens among them."""
    checkpoint, found = READ[name], reading(name)
    without, tables = found.num_multiplied / 1e9, 2 * found.num_of_tables / 1e9
    assert checkpoint.active is not None
    assert without * (1 - ROUNDED) <= checkpoint.active <= (without + tables) * (1 + ROUNDED)


@pytest.mark.parametrize("name", [name for name in READ if READ[name].kv_bytes is not None])
def test_a_token_keeps_so_many_bytes(name: str) -> None:
    assert reading(name).kv_bytes_per_token == READ[name].kv_bytes


@pytest.mark.parametrize("name", READ)
def test_only_keys_without_effect_are_reported(name: str) -> None:
    assert reading(name).warned == set(READ[name].warned)


@pytest.mark.parametrize("name", REFUSED)
def test_a_key_that_is_not_served_is_named(name: str) -> None:
    refused = BY_NAME[name].refused
    assert refused is not None
    with pytest.raises(UnsupportedCheckpointError, match=re.escape(refused)):
        read(BY_NAME[name].config)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", {"rope_interleaved": True}),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", {"use_mrope": True}),
        ("Qwen/Qwen2.5-7B-Instruct", {"dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192}}),
        ("mistralai/Mistral-7B-v0.1", {"attention_bias": True}),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", {"qkv_bias": True}),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", {"shared_expert_intermediate_size": 768}),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", {"use_qk_norm": False}),
        ("meta-llama/Llama-3.1-8B", {"use_qk_norm": True}),
        ("microsoft/phi-4", {"lm_head_bias": True}),
        ("microsoft/phi-4", {"mlp_bias": True}),
        ("microsoft/phi-4", {"full_attn_mod": 2}),
        ("microsoft/phi-4", {"interpolate_factor": 4}),
        ("zai-org/GLM-4.5-Air", {"scoring_func": "softmax"}),
        ("zai-org/GLM-4.5-Air", {"topk_method": "greedy"}),
        ("MiniMaxAI/MiniMax-M2", {"scoring_func": "softmax"}),
        ("MiniMaxAI/MiniMax-M2", {"use_routing_bias": False}),
        ("MiniMaxAI/MiniMax-M2", {"use_qk_norm": False}),
        ("MiniMaxAI/MiniMax-M2", {"qk_norm_type": "per_head"}),
        ("MiniMaxAI/MiniMax-M2", {"shared_intermediate_size": 1536}),
        ("MiniMaxAI/MiniMax-M2", {"attn_type_list": [1, 0] * 31}),
    ],
)
def test_options_that_other_engines_read_are_refused_when_they_differ(name: str, changes: dict[str, Any]) -> None:
    """`transformers` has no code for them: what it would compute is not what such a checkpoint means."""
    with pytest.raises(UnsupportedCheckpointError, match=next(iter(changes))):
        read({**BY_NAME[name].config, **changes})


def test_head_of_a_wrapped_model_is_its_own_unless_a_file_says_otherwise() -> None:
    """Mistral Small 3.1 ties nothing and says nothing of it; Ministral 3 3B says it inside, Devstral 2 outside."""
    names = (
        "Mistral-Small-3.1-24B-Instruct-2503",
        "Ministral-3-3B-Instruct-2512-BF16",
        "Devstral-Small-2-24B-Instruct-2512",
    )
    tied = [read(BY_NAME[f"mistralai/{name}"].config).tie_word_embeddings for name in names]
    assert tied == [False, True, False]


def test_text_model_of_an_unknown_kind_is_refused() -> None:
    config = BY_NAME["mistralai/Ministral-3-3B-Instruct-2512-BF16"].config
    with pytest.raises(UnsupportedCheckpointError, match='model_type="mistral5" is not served; supported: ministral3'):
        read({**config, "text_config": {**config["text_config"], "model_type": "mistral5"}})


def test_experts_of_deepseek_v4_with_another_activation_are_refused() -> None:
    """They were computed with SiLU, which is what is clamped, and the key was taken as read."""
    config = BY_NAME["deepseek-ai/DeepSeek-V4-Flash"].config
    with pytest.raises(UnsupportedCheckpointError, match='hidden_act="gelu_pytorch_tanh" is not served'):
        read({**config, "hidden_act": "gelu_pytorch_tanh"})


@pytest.mark.parametrize("name", ["Qwen/Qwen3-30B-A3B", "google/gemma-3-27b-it", "openai/gpt-oss-120b"])
def test_a_directory_with_the_file_can_be_planned_for(name: str, tmp_path: Path) -> None:
    config = {key: value for key, value in BY_NAME[name].config.items() if key != "quantization_config"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    cost = named_model(str(tmp_path), weight_bits=16, kv_bits=16)
    assert cost.num_parameters == pytest.approx(BY_NAME[name].total, rel=PRECISION)


@pytest.mark.parametrize("name", BY_NAME)
def test_keys_from_memory_are_keys_of_a_copy_that_was_seen(name: str) -> None:
    checkpoint = BY_NAME[name]
    keys = {*checkpoint.config, *checkpoint.config.get("text_config", {})}
    assert set(checkpoint.recalled) <= (keys if checkpoint.source else set())
