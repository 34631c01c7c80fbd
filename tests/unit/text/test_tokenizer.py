"""Encoding and decoding equal transformers' fast tokenizers; damaged files are refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tandem.core.errors import CorruptCheckpointError, InvalidRequestError, UnsupportedCheckpointError
from tandem.text.tokenizer import Tokenizer
from tests.unit.text import checkpoints

Build = Callable[..., Path]
TEXTS = [
    *checkpoints.SAMPLE,
    "",
    " ",
    "  spaces   everywhere  ",
    "a<|user|>b <tool>c  <mask> d",
    "lazy dogs, crazylazy dogs",
    "<|begin|>hi<|end|> <s>hi</s><unk>",
    "emoji 🙂 and \x00 control \t\r\n",
]
CONFIGS: list[dict[str, Any]] = [
    {},
    {"add_bos_token": True, "add_eos_token": True},
    {"add_bos_token": False},
    {"clean_up_tokenization_spaces": True},
    {"additional_special_tokens": ["<|extra|>", "<|user|>"]},
    {"pad_token": {"__type": "AddedToken", "content": "<pad>", "rstrip": True, "normalized": False}},
    {"image_token": "<image>", "pad_token": "<pad>", "eos_token": "<mask>"},
    {"extra_special_tokens": {"audio_token": "<end>"}},
    {
        "added_tokens_decoder": {
            "9": {"content": "<new>", "special": False},
            "10": {"content": "<end>", "special": True},
        }
    },
    {"added_tokens_decoder": {"9": {"content": "<end>", "special": False}}, "pad_token": "<end>"},
    {"split_special_tokens": True},
]


def _pair(directory: Path) -> tuple[Tokenizer, Any]:
    return Tokenizer.load(directory), PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("build", [checkpoints.byte_level, checkpoints.sentencepiece])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: next(iter(config), "plain"))
def test_equals_transformers(build: Build, config: dict[str, Any], tmp_path: Path) -> None:
    ours, theirs = _pair(build(tmp_path, config))
    for text in [*TEXTS, "x<|extra|> <pad>  <new><end> y<image>"]:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids
            assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(ids, skip_special_tokens=special)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs)
    special_ids = {token_id for token_id in range(ours.vocab_size) if ours.is_special(token_id)}
    assert special_ids == {i for i, token in theirs.added_tokens_decoder.items() if token.special}
    assert ours.token(ours.vocab_size) is None


@pytest.mark.parametrize("build", [checkpoints.byte_level, checkpoints.sentencepiece])
def test_any_text_encodes_as_transformers(build: Build, tmp_path: Path) -> None:
    ours, theirs = _pair(build(tmp_path))

    @settings(max_examples=150, deadline=None)
    @given(text=st.text(max_size=60))
    def check(text: str) -> None:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)

    check()


@pytest.mark.filterwarnings("ignore")
def test_tokens_of_older_checkpoints_are_found(tmp_path: Path) -> None:
    """special_tokens_map.json and added_tokens.json, from before tokenizer_config.json held everything."""
    directory = checkpoints.byte_level(tmp_path)
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (directory / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<|end|>", "lstrip": False}, "bos_token": "<|begin|>"})
    )
    ours, theirs = _pair(directory)
    assert ours.eos_token_id == theirs.eos_token_id is not None
    assert ours.encode("hi<|end|> there") == theirs.encode("hi<|end|> there")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("config", [{}, {"tool_token": "<tool>"}, {"added_tokens_decoder": {}}], ids=str)
def test_tokens_of_older_checkpoints_keep_the_flags_of_tokenizer_json(config: dict[str, Any], tmp_path: Path) -> None:
    """Regression: `added_tokens.json`, which has no flags, made control tokens text that was shown in answers; and
    names did not make control tokens of text.
    """
    directory = checkpoints.byte_level(tmp_path, config)
    ids = json.loads((directory / "tokenizer.json").read_text())["added_tokens"]
    (directory / "added_tokens.json").write_text(json.dumps({token["content"]: token["id"] for token in ids}))
    ours, theirs = _pair(directory)
    for token_id, token in theirs.added_tokens_decoder.items():
        assert ours.is_special(token_id) == token.special, token
        assert ours.backend.get_added_tokens_decoder()[token_id] == token
    text = "a<|user|> b<tool> lazy dogs <mask>"
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)


def test_a_checkpoint_without_configuration_still_encodes(tmp_path: Path) -> None:
    directory = checkpoints.byte_level(tmp_path)
    (directory / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.eos_token_id is None
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    directory = checkpoints.byte_level(tmp_path)
    data = json.loads((directory / "tokenizer.json").read_text())
    data["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    data["padding"] = {
        "strategy": {"Fixed": 50},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|end|>",
    }
    (directory / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.decode(tokenizer.encode("a text of many tokens")) == "a text of many tokens"


def test_token_bytes_are_what_a_token_adds(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(checkpoints.sentencepiece(tmp_path))
    ids = tokenizer.encode("ö fox", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == " ö fox".encode()
    assert tokenizer.token_bytes(10**6) == b""


def test_text_that_is_no_unicode_is_the_callers_fault(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="not valid Unicode"):
        Tokenizer.load(checkpoints.byte_level(tmp_path)).encode("lone \ud800 surrogate")


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json"])
def test_another_tokenizer_format_is_refused_with_the_remedy(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\n\x05")
    with pytest.raises(UnsupportedCheckpointError, match=f"{name}.*save_pretrained"):
        Tokenizer.load(tmp_path)


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpointError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff\xfe{}", b"{}", b'{"model": {"type": "Nonsense"}}', b"[" * 100_000, b'{"model": 3}'],
    ids=lambda content: repr(content[:30]),
)
def test_a_damaged_tokenizer_is_corrupt(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[1]"),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {"content": "a"}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"1": {"content": 5}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"1": {"content": "a", "lstrip": "no"}}}'),
        ("special_tokens_map.json", "nope"),
        ("added_tokens.json", '{"a": "b"}'),
    ],
)
def test_damaged_configuration_is_corrupt(name: str, content: str, tmp_path: Path) -> None:
    directory = checkpoints.byte_level(tmp_path)
    (directory / name).write_text(content)
    with pytest.raises(CorruptCheckpointError, match=name.split(".")[0]):
        Tokenizer.load(directory)


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(CorruptCheckpointError, match="bytes; at most"):
        Tokenizer.load(tmp_path)
