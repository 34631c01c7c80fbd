"""A field is acted on, harmless, or refused by name."""

import json
from typing import Any

import orjson
import pytest

from tandem.gateway.errors import RequestError
from tandem.gateway.openai.fields import ChatBody, CompletionBody, read_body

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def read(**more: Any) -> ChatBody:
    return read_body(ChatBody, json.dumps(CHAT | more).encode())


@pytest.mark.parametrize(
    "harmless",
    [
        {"user": "x"},
        {"service_tier": "flex"},
        {"store": False},
        {"echo": False},
        {"modalities": ["text"]},
        {"anything": None},
        {"functions": None},
        {"prompt_cache_options": {"ttl": "1h", "prewarm": None}},
    ],
)
def test_what_asks_for_nothing_is_taken(harmless: dict[str, Any]) -> None:
    assert read(**harmless).model == "m"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("store", True),
        ("echo", True),
        ("modalities", ["audio"]),
        ("guided_json", {}),
        ("typo_temperature", 1),
        ("suffix", "x"),
        ("store", 0.0001),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as refusal:
        read(**{name: value})
    assert (refusal.value.param, refusal.value.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"n": "2"}, "n"),
        ({"n": 1.5}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stop": [1]}, "stop"),
        ({"messages": [1]}, "messages"),
        ({"seed": 2**70}, "seed"),
        ({"priority": 2**40}, "priority"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options"),
        ({"prompt_cache_options": {"tll": "1h"}}, "prompt_cache_options"),
    ],
)
def test_a_wrong_type_is_refused_by_name(more: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refusal:
        read(**more)
    assert refusal.value.param == param


@pytest.mark.parametrize("prompt", ["x", [1, 2], ["a", "b"], [[1], [2, 3]]])
def test_a_prompt_has_four_forms(prompt: Any) -> None:
    body = orjson.dumps({"model": "m", "prompt": prompt})
    assert read_body(CompletionBody, body).prompt == prompt


@pytest.mark.parametrize("prompt", [1, None, ["a", 1], [[1], "a"], {"a": 1}, [[True]], [1.5]])
def test_a_prompt_has_no_fifth_form(prompt: Any) -> None:
    with pytest.raises(RequestError) as refusal:
        read_body(CompletionBody, orjson.dumps({"model": "m", "prompt": prompt}))
    assert refusal.value.param == "prompt"


def test_a_missing_field_is_named() -> None:
    with pytest.raises(RequestError, match="messages is missing"):
        read_body(ChatBody, b'{"model": "m"}')
