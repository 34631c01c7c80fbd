"""The checkpoint that ships with the repository: loads offline, is small, speaks its template, and stops by itself."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

DEMO = Path(__file__).parents[2] / "demo" / "tandem-demo"
MAX_DIRECTORY_BYTES = 12 * 1024 * 1024
MAX_NEW_TOKENS = 200

# From docstrings of `selectors`, a file kept out of training.
HELD_OUT_TEXT = '''\
"""Selectors module.

This module allows high-level and efficient I/O multiplexing, built upon the
`select` module primitives.
"""


class BaseSelector(metaclass=ABCMeta):
    """Selector abstract base class.

    A selector supports registering file objects to be monitored for specific
    I/O events.

    A file object is a file descriptor or any object with a `fileno()` method.
    An arbitrary object can be attached to the file object, which can be used
    for example to store context information, a callback, etc.
    """
'''
MAX_HELD_OUT_PERPLEXITY = 60.0

QUESTIONS = ("What does os.path.join do?", "What is len?", "Hello!", "Explain the 'with' statement.")

WEATHER_TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32, local_files_only=True)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO, local_files_only=True)


def test_directory_is_small_and_complete() -> None:
    sizes = {path.name: path.stat().st_size for path in DEMO.iterdir()}
    assert sum(sizes.values()) <= MAX_DIRECTORY_BYTES
    assert {"README.md", "config.json", "generation_config.json", "model.safetensors"} <= sizes.keys()
    assert {"chat_template.jinja", "tokenizer.json", "tokenizer_config.json", "training.json"} <= sizes.keys()


def test_config_is_a_qwen3_that_suits_kernels() -> None:
    config = json.loads((DEMO / "config.json").read_text())
    assert config["model_type"] == "qwen3"
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is True
    assert config["head_dim"] == 64
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    assert all(config[key] % 64 == 0 for key in ("hidden_size", "intermediate_size", "vocab_size"))
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]


def test_training_record_agrees_with_the_card() -> None:
    record = json.loads((DEMO / "training.json").read_text())
    card = (DEMO / "README.md").read_text()
    assert record["corpus_sha256"] in card
    assert f"{record['settings']['num_steps']} steps" in card
    for kind in ("plain", "chat"):
        assert f"{record['held_out'][kind]['perplexity']:.2f}" in card


def test_generation_stops_at_either_end_token(model: Any, tokenizer: Any) -> None:
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert model.generation_config.eos_token_id == ends
    assert model.config.vocab_size == len(tokenizer)


@pytest.mark.parametrize("text", [HELD_OUT_TEXT, "  naïve → 你好 🚲\r\n\tx=1\n\n", "a<|im_end|>b</think>"])
def test_tokenizer_loses_nothing(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_one_token_each(tokenizer: Any) -> None:
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
    assert [len(tokenizer.encode(name)) for name in names] == [1] * len(names)
    assert tokenizer.eos_token == "<|im_end|>"


def test_held_out_text_is_not_noise(model: Any, tokenizer: Any) -> None:
    ids = torch.tensor([tokenizer.encode(HELD_OUT_TEXT)])
    with torch.inference_mode():
        loss = float(model(input_ids=ids, labels=ids).loss)
    assert math.exp(loss) < MAX_HELD_OUT_PERPLEXITY


def render(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


def test_template_renders_a_conversation_exactly(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is len?"},
        {"role": "assistant", "content": "A function."},
        {"role": "user", "content": "Thanks"},
    ]
    assert render(tokenizer, messages, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is len?<|im_end|>\n"
        "<|im_start|>assistant\nA function.<|im_end|>\n"
        "<|im_start|>user\nThanks<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_template_renders_tools_exactly(tokenizer: Any) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "sun"},
        {"role": "tool", "content": "rain"},
    ]
    rendered_call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    assert render(tokenizer, messages, tools=[WEATHER_TOOL]) == (
        "<|im_start|>system\nThese functions can be called, one JSON description a line:\n"
        '{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}\n'
        "To call one, write its name and arguments as JSON, like this:\n"
        '<tool_call>\n{"name": "function", "arguments": {"key": "value"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nWeather?<|im_end|>\n"
        f"<|im_start|>assistant\n{rendered_call}\n{rendered_call}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nsun\n</tool_response>"
        "\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
    )


def test_template_extends_what_came_before(tokenizer: Any) -> None:
    """A follow-up's prompt starts with the text of the turn it follows, so its KV can be reused."""
    first: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
    answer, follow_up = {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "What is len?"}
    prompt = render(tokenizer, first, add_generation_prompt=True)
    assert render(tokenizer, [*first, answer, follow_up]).startswith(prompt + "Hello!<|im_end|>\n")


def greedy_answer(model: Any, tokenizer: Any, question: str) -> list[int]:
    prompt = render(tokenizer, [{"role": "user", "content": question}], add_generation_prompt=True)
    ids = torch.tensor([tokenizer.encode(prompt)])
    mask = torch.ones_like(ids)
    with torch.inference_mode():
        output = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
    return [int(token) for token in output[0, ids.shape[1] :]]


@pytest.mark.filterwarnings("ignore::UserWarning:transformers")
def test_greedy_chat_ends_by_itself(model: Any, tokenizer: Any) -> None:
    answers = [greedy_answer(model, tokenizer, question) for question in QUESTIONS]
    assert any(len(answer) > 3 and answer[-1] == tokenizer.eos_token_id for answer in answers)
