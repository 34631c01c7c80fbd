"""Ids of many texts are those of `transformers` on the same metadata, for every split that both know."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import pre_tokenizers, trainers
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    convert_gguf_tokenizer,
    get_gguf_tokenizer,
)

from tandem.models.gguf.byte_level import SPLITS
from tandem.models.gguf.file import GgufFile
from tandem.models.gguf.tokenizer import tokenizer_json
from tests.helpers.checkpoints import save_tiny_gemma3, save_tiny_llama, save_tiny_phi3
from tests.helpers.gguf_files import write_gguf

TEXTS = (
    "Hello, world! It's 12345 o'clock, you'LL see: 3.14 and 1e-5.",
    "  two spaces,\ttab,\n\n two lines \r\n and the end   ",
    "def f(x):\n    return x  # naïve café, Ünïcödé, ПриветМир, 東京タワー, 한국어",
    "camelCase HTTPServer XMLHttpRequest IT'S a/b//c -- ... !!! 😀👍🏽",
    "",
    " ",
    "<|im_start|>user\nhi<|im_end|>",
)
SIZE = 700


@pytest.fixture(scope="module")
def trained() -> tuple[list[str], list[str]]:
    """A byte-level vocabulary and its merges, of two control tokens at the end."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE - 2, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([*TEXTS, Path(__file__).read_text()] * 3, trainer)
    vocabulary = backend.get_vocab()
    merges = [" ".join(pair) for pair in _model(backend)["merges"]]
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    padding = [f"[PAD{i}]" for i in range(SIZE - 2 - len(tokens))]
    return [*tokens, *padding, "<|im_start|>", "<|im_end|>"], merges


def _model(backend: tokenizers.Tokenizer) -> dict[str, list[list[str]]]:
    found: dict[str, list[list[str]]] = json.loads(backend.to_str())["model"]
    return found


@pytest.mark.parametrize("name", [name for name in SPLITS if name in GGUF_PRE_TOKENIZER_SPLITS])
def test_splits(tmp_path: Path, trained: tuple[list[str], list[str]], name: str) -> None:
    tokens, merges = trained
    checkpoint = save_tiny_llama(tmp_path / "tiny", vocab_size=SIZE, num_hidden_layers=1)
    path = write_gguf(
        checkpoint,
        tmp_path / "a.gguf",
        tokenizer__ggml__pre=name,
        tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__merges=merges,
        tokenizer__ggml__token_type=[1] * (SIZE - 2) + [3, 3],
    )
    architecture, metadata, _ = get_gguf_tokenizer(str(path))
    expected, _ = convert_gguf_tokenizer(architecture, metadata)
    with GgufFile(path) as file:
        found = tokenizers.Tokenizer.from_str(tokenizer_json(file))
    for text in TEXTS:
        ids = found.encode(text, add_special_tokens=False).ids
        assert ids == expected.encode(text, add_special_tokens=False).ids, text
        assert found.decode(ids, skip_special_tokens=False) == text


MARK = "\u2581"
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
ENDS = ["<|user|>", "<tool>", "   "]  # a control token and two that users defined


@pytest.fixture(scope="module")
def pieces() -> list[str]:
    """Of more than one character in the order of their merges, then characters, as SentencePiece's trainer has them."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.train_from_iterator(
        [*TEXTS, Path(__file__).read_text()] * 3, trainers.BpeTrainer(vocab_size=500, show_progress=False)
    )
    merged = ["".join(pair) for pair in _model(backend)["merges"]]
    single = sorted(token for token in backend.get_vocab() if len(token) == 1 and token not in "東京")
    return [piece for piece in dict.fromkeys([*merged, *single]) if piece not in {*SPECIAL, *BYTES, *ENDS}]


OPTIONS: dict[str, dict[str, Any]] = {"gemma3": {"layer_types": None}}


def sentencepiece_file(path: Path, pieces: list[str], architecture: str, **values: Any) -> Path:
    tokens = [*SPECIAL, *BYTES, *pieces, *ENDS]
    save = {"llama": save_tiny_llama, "gemma3": save_tiny_gemma3, "phi3": save_tiny_phi3}[architecture]
    checkpoint = save(path / "tiny", vocab_size=len(tokens), num_hidden_layers=1, **OPTIONS.get(architecture, {}))
    scores = [0.0] * (len(SPECIAL) + len(BYTES)) + [-float(rank) for rank in range(len(pieces))] + [-1000.0] * len(ENDS)
    metadata: dict[str, Any] = {
        "tokenizer__ggml__model": "llama",
        "tokenizer__ggml__pre": "default",
        "tokenizer__ggml__tokens": tokens,
        "tokenizer__ggml__scores": scores,
        "tokenizer__ggml__token_type": [2, 3, 3] + [6] * len(BYTES) + [1] * len(pieces) + [3, 4, 4],
        "tokenizer__ggml__merges": None,
        "tokenizer__ggml__bos_token_id": 1,
        "tokenizer__ggml__eos_token_id": 2,
        "tokenizer__ggml__unknown_token_id": 0,
    }
    return write_gguf(checkpoint, path / "a.gguf", **metadata | values)


def best_first(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's rule: the two neighbours that make the best piece become one, the first two where several do.

    Written independently of merges. What has no piece is bytes.
    """
    parts = list(text)
    while True:
        made = [
            (scores[left + right], -at) for at, (left, right) in enumerate(pairwise(parts)) if left + right in scores
        ]
        if not made:
            break
        at = -max(made)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [token for part in parts for token in ([part] if part in scores else _bytes(part))]


def _bytes(part: str) -> list[str]:
    return [BYTES[byte] for byte in part.encode()]


def found_in(path: Path) -> tokenizers.Tokenizer:
    with GgufFile(path) as file:
        return tokenizers.Tokenizer.from_str(tokenizer_json(file))


def test_pieces_are_merged_as_sentencepiece_does(tmp_path: Path, pieces: list[str]) -> None:
    found = found_in(sentencepiece_file(tmp_path, pieces, "llama"))
    scores = {piece: -float(rank) for rank, piece in enumerate(pieces)}
    for text in (text for text in TEXTS if text and "   " not in text):
        expected = best_first(MARK + text.replace(" ", MARK), scores)
        assert found.encode(text).tokens == ["<s>", *expected], text
        assert found.decode(found.encode(text).ids) == text
    assert found.encode("<|user|>b").tokens[:3] == ["<s>", "<|user|>", f"{MARK}b"], "a space before each part"


@pytest.mark.parametrize("architecture", ["phi3", "gemma3"])
def test_families_of_sentencepiece_are_transformers(tmp_path: Path, pieces: list[str], architecture: str) -> None:
    has_prefix = architecture == "phi3"
    values: dict[str, Any] = {} if has_prefix else {"tokenizer__ggml__add_space_prefix": False}
    path = sentencepiece_file(tmp_path, pieces, architecture, **values)
    kind, metadata, _ = get_gguf_tokenizer(str(path))
    expected, _ = convert_gguf_tokenizer(kind, metadata)
    found = found_in(path)
    for text in (*TEXTS, "x <tool> y<tool>", "a    b"):
        ids = found.encode(text, add_special_tokens=False).ids
        assert ids == expected.encode(text, add_special_tokens=False).ids, text
        assert found.decode(ids) == expected.decode(ids), text
        assert found.decode(ids) == text or (has_prefix and any(token in text for token in ENDS))


def test_phi_3_takes_the_spaces_behind_its_control_tokens(tmp_path: Path, pieces: list[str]) -> None:
    found = found_in(sentencepiece_file(tmp_path, pieces, "phi3"))
    assert found.encode("<|user|>\n hi").ids == found.encode("<|user|>hi").ids
    assert found.encode("<s>\nhi").ids != found.encode("<s>hi").ids
    other = found_in(sentencepiece_file(tmp_path / "other", pieces, "llama"))
    assert other.encode("<|user|>\nhi").ids != other.encode("<|user|>hi").ids
