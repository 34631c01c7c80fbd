"""A prompt becomes its ids; one that cannot fit is refused before it has cost much."""

import asyncio
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.core.errors import InvalidRequestError
from tandem.gateway import prompt_encoder
from tandem.gateway.errors import RequestError
from tandem.gateway.prompt_encoder import PromptEncoder
from tandem.text.tokenizer import Tokenizer
from tests.helpers.fake_backend import MAX_MODEL_LEN, MODEL, FakeCluster, tell
from tests.helpers.tokenizers import write_byte_tokenizer

DIGITS = "0123456789" * 400_000
PROSE = "The quick brown fox jumps over the lazy dog. " * 100_000


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(write_byte_tokenizer(tmp_path))


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of characters in each call of the tokenizer."""
    sizes: list[int] = []
    encode = Tokenizer.encode

    def noted(self: Tokenizer, text: str, **options: Any) -> list[int]:
        sizes.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    return sizes


def encoded(tokenizer: Tokenizer, text: str, max_model_len: int, *, is_only_counted: bool = False) -> list[int]:
    async def run() -> list[int]:
        encoder = PromptEncoder(tokenizer)
        try:
            return await encoder.encode(text, max_model_len, add_special_tokens=False, is_only_counted=is_only_counted)
        finally:
            encoder.close()

    return asyncio.run(run())


@pytest.mark.parametrize("text", [DIGITS, PROSE], ids=["digits", "prose"])
def test_a_prompt_that_cannot_fit_is_hardly_encoded(tokenizer: Tokenizer, shown: list[int], text: str) -> None:
    with pytest.raises(RequestError, match=r"at least 6\d{4} tokens > 4095 maximum") as refusal:
        encoded(tokenizer, text, 4096)
    assert refusal.value.code == "context_length_exceeded"
    assert sum(shown) <= 64 * 1024


@pytest.mark.parametrize(
    ("size", "character"), [(2048, "a"), (64 * 1024, "a"), (64 * 1024 + 1, "a"), (64 * 1024, "漢"), (200_000, "漢")]
)
def test_to_the_last_token_that_fits(tokenizer: Tokenizer, size: int, character: str) -> None:
    text = character * size
    num_tokens = size * len(character.encode())
    assert len(encoded(tokenizer, text, num_tokens + 1)) == num_tokens
    with pytest.raises(RequestError, match=rf"too long: {num_tokens} tokens > {num_tokens - 1} maximum"):
        encoded(tokenizer, text, num_tokens)


def test_pieces_may_have_more_tokens_than_the_whole(tokenizer: Tokenizer, shown: list[int]) -> None:
    """A special token that a piece's end cuts in two is many tokens there."""
    text = "a" * (64 * 1024 - 5) + "<|endoftext|>" + "a" * 5
    num_tokens = 64 * 1024 + 1
    assert len(encoded(tokenizer, text * 9, 9 * num_tokens + 1)) == 9 * num_tokens
    assert shown[-1] == 9 * len(text) > shown[0]


def test_what_is_only_counted_may_be_longer(tokenizer: Tokenizer, shown: list[int]) -> None:
    assert len(encoded(tokenizer, "a" * 64 * 4096, 4096, is_only_counted=True)) == 64 * 4096
    shown.clear()
    with pytest.raises(RequestError, match=r"at least \d+ tokens > 4095 maximum"):
        encoded(tokenizer, DIGITS, 4096, is_only_counted=True)
    assert sum(shown) <= 5 * 64 * 1024


def test_the_longest_text_is_bounded_whatever_its_tokens(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text, **options: [0] * (len(text) // 1000))
    with pytest.raises(RequestError, match="4193280 are tokenised") as refusal:
        encoded(tokenizer, "a" * 5_000_000, 4096)
    assert refusal.value.code == "context_length_exceeded"


def test_no_text_is_refused_however_long(tokenizer: Tokenizer) -> None:
    for size in (1, 3000, 70_000):
        with pytest.raises(InvalidRequestError, match="Unicode"):
            encoded(tokenizer, "a" * size + "\ud800", 100_000)


def test_who_leaves_is_encoded_no_further(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose client had left went on to be encoded to its end."""
    pieces: list[int] = []

    async def run() -> None:
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def encode(self: Tokenizer, text: str, **options: Any) -> list[int]:
            pieces.append(len(text))
            loop.call_soon_threadsafe(begun.set)
            return [0] * len(text)

        monkeypatch.setattr(Tokenizer, "encode", encode)
        encoder = PromptEncoder(tokenizer)
        work = asyncio.create_task(encoder.encode(DIGITS, 10**9, add_special_tokens=False))
        await begun.wait()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await encoder.encode("b" * 600_000, 10**9, add_special_tokens=False)  # NOTE: which comes after it
        encoder.close()

    asyncio.run(run())
    assert sum(pieces) <= 2 * 64 * 1024 + 2 * 600_000


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


SERVED: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/chat/completions": lambda text: {"messages": said(text)},
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/responses": lambda text: {"input": text},
    "/v1/messages": lambda text: {"messages": said(text), "max_tokens": 8},
}
COUNTED: dict[str, tuple[Callable[[str], dict[str, Any]], str]] = {
    "/v1/messages/count_tokens": (lambda text: {"messages": said(text)}, "input_tokens"),
    "/v1/responses/input_tokens": (lambda text: {"input": text}, "input_tokens"),
    "/tokenize": (lambda text: {"messages": said(text)}, "count"),
}


@pytest.mark.parametrize("path", SERVED)
@pytest.mark.parametrize("text", ["x " * 6000, DIGITS[:500_000]], ids=["long", "endless"])
def test_clients_know_a_prompt_that_is_too_long(tmp_path: Path, path: str, text: str) -> None:
    """Claude Code and LangChain know Anthropic's words for it, LiteLLM OpenAI's; nothing compacted a conversation."""

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        answer = await client.post(path, json={"model": MODEL, **SERVED[path](text)})
        error = answer.json()["error"]
        assert answer.status_code == 400
        found = re.search(r"prompt is too long[^0-9]*(\d+) tokens? > (\d+)", error["message"])
        assert found is not None
        assert 12_000 <= int(found.group(1)) <= 70_000
        assert int(found.group(2)) == MAX_MODEL_LEN - 1
        assert f"this model's maximum context length is {MAX_MODEL_LEN}" in error["message"]
        if path == "/v1/messages":
            assert error["type"] == "invalid_request_error"
        else:
            assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")

    tell(tmp_path, story)


@pytest.mark.parametrize("path", COUNTED)
def test_what_is_longer_than_the_context_is_counted(tmp_path: Path, path: str) -> None:
    """A prompt that did not fit was refused where people count to see whether it does."""
    body, name = COUNTED[path]

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        short, long = [
            (await client.post(path, json={"model": MODEL, **body("x " * size)})).json()[name] for size in (1, 6001)
        ]
        assert long - short == 12_000
        endless = await client.post(path, json={"model": MODEL, **body(DIGITS[:500_000])})
        assert endless.status_code == 400
        assert f"tokens > {MAX_MODEL_LEN - 1} maximum" in endless.json()["error"]["message"]

    tell(tmp_path, story)


def test_long_texts_do_not_hold_up_others(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts held the threads that everything else of the process waits for."""

    async def run() -> None:
        go, begun = threading.Event(), asyncio.Event()
        loop, encode = asyncio.get_running_loop(), Tokenizer.encode

        def held(self: Tokenizer, text: str, **options: Any) -> list[int]:
            if len(text) == prompt_encoder.CHARACTERS_PER_CALL:
                loop.call_soon_threadsafe(begun.set)
                go.wait(20)
            return encode(self, text, **options)

        monkeypatch.setattr(Tokenizer, "encode", held)
        encoder = PromptEncoder(tokenizer)
        try:
            long = [asyncio.create_task(encoder.encode(DIGITS, 4096, add_special_tokens=False)) for _ in range(64)]
            await begun.wait()
            assert await asyncio.to_thread(lambda: 1) == 1
            assert len(await encoder.encode("a" * 4000, 4096, add_special_tokens=False)) == 4000
            assert not any(task.done() for task in long)
        finally:
            go.set()
            await asyncio.gather(*long, return_exceptions=True)
            encoder.close()

    asyncio.run(run())
