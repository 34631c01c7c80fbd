"""`/tokenize` and its kin: the ids that requests are served with, in the shape that vLLM's clients read."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.text.tokenizer import Tokenizer
from tests.helpers.fake_backend import MAX_MODEL_LEN, MODEL, SAYS_JSON, FakeCluster, tell
from tests.helpers.tokenizers import CHAT_TEMPLATE, NUM_TOKENS

CHAT = [{"role": "user", "content": "Grüße"}]


def test_a_prompt_becomes_the_ids_that_it_is_served_with(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        told = (await client.post("/tokenize", json={"model": MODEL, "prompt": "Grüße <|im_end|>"})).json()
        served = {"model": MODEL, "prompt": "Grüße <|im_end|>", "max_tokens": 1, "return_token_ids": True}
        (choice,) = (await client.post("/v1/completions", json=served)).json()["choices"]
        assert told["tokens"] == choice["prompt_token_ids"]
        assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), MAX_MODEL_LEN)
        assert told["token_strs"] is None

    tell(tmp_path, story)


def test_a_chat_becomes_the_ids_that_it_is_served_with(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        told = (await client.post("/tokenize", json={"messages": CHAT, "model": MODEL})).json()
        served = {"model": MODEL, "messages": CHAT, "max_tokens": 1, "return_token_ids": True}
        answer = (await client.post("/v1/chat/completions", json=served)).json()
        assert told["tokens"] == answer["prompt_token_ids"]
        bare = {"messages": CHAT, "add_generation_prompt": False, "chat_template_kwargs": {"enable_thinking": False}}
        text = "<|im_start|>user\nGrüße<|im_end|>\n"
        ids = (await client.post("/tokenize", json=bare)).json()["tokens"]
        assert (await client.post("/detokenize", json={"tokens": ids})).json() == {"prompt": text}

    tell(tmp_path, story)


def test_large_integers_of_a_chat_are_tokenised_to_the_digit(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        call = {"id": "c", "type": "function", "function": {"name": "pay", "arguments": {"wei": 2**70 + 12345}}}
        chat = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [call]}]
        chat += [{"role": "tool", "tool_call_id": "c", "content": "paid"}]
        told = (await client.post("/tokenize", content=json.dumps({"messages": chat}), headers=SAYS_JSON)).json()
        text = (await client.post("/detokenize", json={"tokens": told["tokens"]})).json()["prompt"]
        assert str(2**70 + 12345) in text
        served = {"model": MODEL, "messages": chat, "max_tokens": 1, "return_token_ids": True}
        answer = (await client.post("/v1/chat/completions", content=json.dumps(served), headers=SAYS_JSON)).json()
        assert told["tokens"] == answer["prompt_token_ids"]

    (tmp_path / "chat_template.jinja").write_text("{% for message in messages %}{{ message | tojson }}{% endfor %}")
    tell(tmp_path, story)


def test_tokens_are_spelled_as_the_vocabulary_does(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        body = {"prompt": "a b<|im_end|>", "return_token_strs": True, "add_special_tokens": False}
        assert (await client.post("/tokenize", json=body)).json()["token_strs"] == ["a", "Ġ", "b", "<|im_end|>"]
        nothing = (await client.post("/tokenize", json={"prompt": ""})).json()
        assert (nothing["count"], nothing["tokens"]) == (0, [])

    tell(tmp_path, story)


def test_what_is_longer_than_the_context_is_counted(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        told = (await client.post("/tokenize", json={"prompt": "a" * (20 * MAX_MODEL_LEN)})).json()
        assert told["count"] == 20 * MAX_MODEL_LEN
        again = (await client.post("/detokenize", json={"tokens": told["tokens"]})).json()
        assert again == {"prompt": "a" * (20 * MAX_MODEL_LEN)}

    tell(tmp_path, story)


def test_the_tokenizer_is_described(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        await client.get("/ready")
        told = (await client.get("/tokenizer_info")).json()
        assert told["chat_template"] == CHAT_TEMPLATE
        assert (told["bos_token"], told["eos_token"], told["pad_token"]) == (None, "<|im_end|>", None)
        assert told["vocab_size"] == Tokenizer.load(cluster.directory).vocab_size
        assert told["model_max_length"] == MAX_MODEL_LEN
        assert (await client.get("/ping")).status_code == 200
        assert (await client.post("/ping")).status_code == 200

    tell(tmp_path, story)


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "neither": ("/tokenize", {}, "give either prompt or messages"),
    "both": ("/tokenize", {"prompt": "a", "messages": CHAT}, "give either prompt or messages"),
    "a model of someone else's": ("/tokenize", {"model": "other", "prompt": "a"}, "'other' does not exist"),
    "a field nobody knows": ("/tokenize", {"prompt": "a", "sparkle": 1}, "sparkle=1 is not supported"),
    "a chat's field with a prompt": ("/tokenize", {"prompt": "a", "tools": []}, "tools goes with messages"),
    "variables with fields of their own": (
        "/tokenize",
        {"messages": CHAT, "chat_template_kwargs": {"tools": 5}},
        "chat_template_kwargs may not hold tools",
    ),
    "no text": ("/tokenize", {"prompt": ["a"]}, "prompt=['a']"),
    "no messages": ("/tokenize", {"messages": []}, "messages is empty"),
    "half a character": ("/tokenize", {"prompt": "\ud800"}, "not valid JSON"),
    "too many strings": ("/tokenize", {"prompt": "a" * 70_000, "return_token_strs": True}, "at most 65536"),
    "too long": ("/tokenize", {"prompt": "a" * (64 * MAX_MODEL_LEN + 1)}, "262145 tokens > 4095 maximum"),
    "no tokens": ("/detokenize", {}, "tokens is missing"),
    "an id too high": ("/detokenize", {"tokens": [1, NUM_TOKENS]}, f"{NUM_TOKENS}, which is not an id from 0 to"),
    "an id too low": ("/detokenize", {"tokens": [-1]}, "-1, which is not an id from 0 to"),
    "a word for an id": ("/detokenize", {"tokens": ["a"]}, "tokens[0]='a'"),
}


@pytest.mark.parametrize(("path", "body", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named(tmp_path: Path, path: str, body: dict[str, Any], message: str) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        spelled = json.dumps(body)  # NOTE: which can spell a surrogate
        answer = await client.post(path, content=spelled, headers=SAYS_JSON)
        assert answer.status_code == (404 if "model" in body else 400)
        assert message in answer.json()["error"]["message"]
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    tell(tmp_path, story)
