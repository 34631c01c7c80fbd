import subprocess
import sys

import pytest

from tandem.architecture.catalogue import catalogue_names, find_cost
from tandem.architecture.cost import ModelCost, read_cost
from tandem.core.errors import ConfigurationError
from tests.helpers.specs import attention_of
from tests.unit.architecture.published import CHECKPOINTS

BY_NAME = {checkpoint.name: checkpoint for checkpoint in CHECKPOINTS}

# As their model cards say, in billions; norms and biases, which planning leaves out, are below 0.1 %.
PUBLISHED = {
    "qwen3-0.6b": 0.596,
    "qwen3-4b": 4.02,
    "qwen3-8b": 8.19,
    "qwen3-14b": 14.8,
    "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5,
    "qwen2.5-7b": 7.62,
    "llama-3-8b": 8.03,
    "llama-3-70b": 70.6,
    "mistral-7b": 7.25,
    "mixtral-8x7b": 46.7,
    "gemma-3-27b": 27.0,
    "gemma-4-e2b": 4.65,  # 2.3 "effective" ones and 2.35 of per-layer embeddings
    "gemma-4-26b-a4b": 25.2,
    "gemma-4-31b": 30.7,
    "deepseek-v2-lite": 15.7,
    "deepseek-v3": 671.0,
    "deepseek-v3.2": 671.9,
    "deepseek-v4-flash": 284.3,
    "glm-5": 744.0,
    "glm-4.7-flash": 29.9,
    "falcon-h1-7b": 7.59,
    "jamba-v0.1": 51.6,
    "nemotron-3-super": 120.6,
    "glm-4.5-air": 106.9,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "minimax-m2": 228.7,
    "minimax-m3": 427.0,
    "olmo-3-7b": 7.30,
    "phi-4": 14.7,
    "dense-30b": 30.0,
}
CONFIGURATIONS = {
    "deepseek-v4-flash": "deepseek-ai/DeepSeek-V4-Flash",
    "jamba-v0.1": "ai21labs/Jamba-v0.1",
    "glm-4.5-air": "zai-org/GLM-4.5-Air",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "minimax-m2": "MiniMaxAI/MiniMax-M2",
    "minimax-m3": "MiniMaxAI/MiniMax-M3",
    "olmo-3-7b": "allenai/Olmo-3-7B-Instruct",
    "phi-4": "microsoft/phi-4",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
}


@pytest.mark.parametrize("name", catalogue_names())
def test_shapes_have_the_published_number_of_parameters(name: str) -> None:
    assert find_cost(name.upper()).num_parameters / 1e9 == pytest.approx(PUBLISHED[name], rel=0.006)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_models_cost_what_their_published_configuration_does(name: str) -> None:
    known, published = find_cost(name), read_cost(BY_NAME[CONFIGURATIONS[name]].config, name)
    assert figures(known) == figures(published)


def figures(cost: ModelCost) -> dict[str, float]:
    return {
        "parameters": sum(tensor.size for tensor in cost.model.tensors()),
        "active": cost.num_active_parameters,
        "multiplied": cost.num_multiplied_parameters,
        "of experts": cost.num_expert_parameters,
        "bytes of state a token": cost.kv_bytes_per_token,
        "bytes of state of 50,000 tokens": cost.kv_bytes(50_000),
    }


def test_mixtures_multiply_a_token_by_few_of_them() -> None:
    """3.3 and 12.9 billion active parameters, the input table included."""
    for name, active in (("qwen3-30b-a3b", 3.35), ("mixtral-8x7b", 12.9)):
        shape = find_cost(name)
        assert (shape.num_active_parameters + shape.num_table_parameters) / 1e9 == pytest.approx(active, rel=0.01)


@pytest.mark.parametrize(
    ("name", "active"), [("gpt-oss-20b", 3.61), ("gpt-oss-120b", 5.13), ("glm-4.5-air", 12.0), ("minimax-m2", 10.0)]
)
def test_active_parameters_are_the_published_ones(name: str, active: float) -> None:
    """In billions. OpenAI counts the output table; GLM's and MiniMax's figures are whole billions."""
    is_exact = name.startswith("gpt-oss")
    found = find_cost(name).num_active_parameters if is_exact else find_cost(name).num_multiplied_parameters
    assert found / 1e9 == pytest.approx(active, rel=0.001 if is_exact else 0.03)


def test_local_layers_of_gemma_keep_a_window() -> None:
    windows = [mixer.window for mixer in attention_of(find_cost("gemma-3-27b").model)]
    assert (len(windows), windows.count(None)) == (62, 10)
    assert set(windows) == {None, 1024}


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"no model is called 'gpt-2'; choose one of qwen3-0\.6b"):
        find_cost("gpt-2")


def test_planning_needs_no_torch() -> None:
    modules = "study, tandem.architecture.catalogue, tandem.planning.hardware"
    code = f"import tandem.planning.{modules}, sys; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
