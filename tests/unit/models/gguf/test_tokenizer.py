"""Ids of many texts are those of `transformers` on the same metadata, for every split that both know."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import pre_tokenizers, trainers
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    convert_gguf_tokenizer,
    get_gguf_tokenizer,
)

from tandem.models.gguf.file import GgufFile
from tandem.models.gguf.tokenizer import SPLITS, tokenizer_json
from tests.helpers.checkpoints import save_tiny_llama
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
