"""Streamed text equals decoding the whole, never ends inside a character and never stalls."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.text.detokenizer import IncrementalDetokenizer
from tandem.text.tokenizer import Tokenizer
from tests.unit.text import checkpoints

TEXTS = [
    *checkpoints.SAMPLE,
    " leading",
    "  two",
    "trailing ",
    "🙂🙃 family 👨‍👩‍👧",
    "",
    "\n",
    "a",
    "ö你🙂",
    "\ufffd ok \ufffd",
]


def _gemma(directory: Path) -> Path:
    return checkpoints.sentencepiece(directory, strips=False)


@pytest.fixture(params=[checkpoints.byte_level, checkpoints.sentencepiece, _gemma], ids=["byte", "llama", "gemma"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    build: Callable[[Path], Path] = request.param
    return Tokenizer.load(build(tmp_path))


def _stream(tokenizer: Tokenizer, prompt: list[int], outputs: list[int], *, skip: bool = True) -> list[str]:
    stream = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [*(stream.add(token_id) for token_id in outputs), stream.flush()]


def _whole(tokenizer: Tokenizer, prompt: list[int], outputs: list[int], *, skip: bool = True) -> str:
    """Text that the outputs add to the prompt's, by decoding everything."""
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    text = tokenizer.decode(prompt + outputs, skip_special_tokens=skip)
    assert text.startswith(before)
    return text[len(before) :]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("prompt", ["", "A prompt", "ends with space "])
@pytest.mark.parametrize("skip", [True, False])
def test_streamed_text_is_the_whole_text(tokenizer: Tokenizer, prompt: str, text: str, skip: bool) -> None:
    prompt_ids = tokenizer.encode(prompt)
    outputs = tokenizer.encode(text, add_special_tokens=False)
    pieces = _stream(tokenizer, prompt_ids, outputs, skip=skip)
    assert "".join(pieces) == _whole(tokenizer, prompt_ids, outputs, skip=skip)
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_the_first_token_after_a_prompt_keeps_its_space(tokenizer: Tokenizer) -> None:
    token_bytes = {token_id: tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)}
    spaced = [token_id for token_id, data in token_bytes.items() if data.startswith(b" ") and data[1:].isalpha()]
    assert spaced
    for token_id in spaced:
        assert "".join(_stream(tokenizer, tokenizer.encode("x"), [token_id])) == token_bytes[token_id].decode()


@pytest.mark.parametrize("skip", [True, False])
def test_random_tokens_stream_as_they_decode(tokenizer: Tokenizer, skip: bool) -> None:
    """Any tokens in any order; runs of byte tokens that are broken UTF-8 have their own test below."""
    rng = random.Random(5)
    byte_tokens = {tokenizer.token_id(f"<0x{byte:02X}>") for byte in range(256)}
    ids = [token_id for token_id in range(tokenizer.vocab_size) if token_id not in byte_tokens]
    for _ in range(300):
        outputs = rng.choices(ids, k=rng.randrange(30))
        prompt = tokenizer.encode("Hi there") if rng.random() < 0.5 else []
        assert "".join(_stream(tokenizer, prompt, outputs, skip=skip)) == _whole(tokenizer, prompt, outputs, skip=skip)


def _byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token for each byte, in either spelling."""
    single = {tokenizer.token_bytes(token_id): token_id for token_id in reversed(range(tokenizer.vocab_size))}
    fallback = {bytes([byte]): tokenizer.token_id(f"<0x{byte:02X}>") for byte in range(256)}
    return [fallback[key] or single[key] for key in (bytes([byte]) for byte in data)]


def test_characters_come_whole(tokenizer: Tokenizer) -> None:
    text = "aö你🙂b"
    pieces = _stream(tokenizer, tokenizer.encode("x"), _byte_ids(tokenizer, text.encode()))
    assert pieces == ["a", "", "ö", "", "", "你", "", "", "", "🙂", "b", ""]


def test_random_bytes_never_stall_and_keep_every_valid_character(tokenizer: Tokenizer) -> None:
    rng = random.Random(6)
    prompt = tokenizer.encode("x")
    errors = "surrogateescape" if tokenizer.rules.byte_fallback else "replace"
    for _ in range(200):
        parts = [rng.choice([rng.randbytes(2), "é".encode(), "🙂".encode(), b"a"]) for _ in range(rng.randrange(12))]
        data = b"".join(parts)
        stream = IncrementalDetokenizer(tokenizer, prompt)
        text = ""
        for count, token_id in enumerate(_byte_ids(tokenizer, data), start=1):
            text += stream.add(token_id)
            settled = data[: max(0, count - 3)].decode("utf-8", errors)
            assert len(text) >= len(settled) - 3
        text += stream.flush()
        expected = "".join("\ufffd" if "\udc80" <= c <= "\udcff" else c for c in data.decode("utf-8", errors))
        assert text == expected
        if not tokenizer.rules.byte_fallback:
            assert text == _whole(tokenizer, prompt, _byte_ids(tokenizer, data))


def test_an_unfinished_character_is_replaced_at_the_end_only(tokenizer: Tokenizer) -> None:
    tool = tokenizer.token_id("<tool>")
    assert tool is not None
    ids = [tool, *_byte_ids(tokenizer, b"\xf0\x9f\x99")]
    pieces = _stream(tokenizer, tokenizer.encode("x"), ids)
    assert pieces[:-1] == ["<tool>", "", "", ""]
    assert set(pieces[-1]) == {"\ufffd"}
    assert "".join(pieces) == _whole(tokenizer, tokenizer.encode("x"), ids)


def test_a_character_begun_by_the_prompt_is_finished(tokenizer: Tokenizer) -> None:
    ids = _byte_ids(tokenizer, "xyz🙂".encode())
    for cut in (4, 5, 6):
        assert "".join(_stream(tokenizer, ids[:cut], ids[cut:])) == "🙂"


def test_special_tokens_are_skipped_or_shown(tokenizer: Tokenizer) -> None:
    user, tool = tokenizer.token_id("<|user|>"), tokenizer.token_id("<tool>")
    assert user is not None
    assert tool is not None
    prompt = tokenizer.encode("x")
    assert "".join(_stream(tokenizer, prompt, [user, tool])) == "<tool>"
    assert "".join(_stream(tokenizer, prompt, [user, tool], skip=False)) == "<|user|><tool>"


def test_ids_without_a_token_add_nothing(tokenizer: Tokenizer) -> None:
    assert _stream(tokenizer, [], [tokenizer.vocab_size + 5]) == ["", ""]


def test_a_long_broken_prompt_does_not_leak_into_the_output(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("x") + _byte_ids(tokenizer, b"\x80") * 20000
    stream = IncrementalDetokenizer(tokenizer, prompt)
    assert stream.add(_byte_ids(tokenizer, b"a")[0]) == "a"
