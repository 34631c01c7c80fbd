"""Builds small real tokenizers in a directory, in the two shapes that language models ship."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SAMPLE = [
    "The quick brown fox jumps over the lazy dog. It's 1984, isn't it?",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))  # three",
    "いろはにほへと ちりぬるを 你好、世界 Привет мир",
]
ADDED = [
    AddedToken("<|user|>", special=True, normalized=False),
    AddedToken("<tool>", special=False, normalized=False),
    AddedToken("lazy dogs", special=False, normalized=True, single_word=True),
    AddedToken("<mask>", special=True, lstrip=True, normalized=False),
]


def byte_level(directory: Path, config: dict[str, Any] | None = None) -> Path:
    """GPT-2 style: bytes as characters, no normaliser, a bos through the post-processor (as Llama 3)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLE, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", tokenizer.token_to_id("<|begin|>"))]
    )
    names = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    return _save(tokenizer, directory, {**names, **(config or {})})


def sentencepiece(
    directory: Path, config: dict[str, Any] | None = None, *, strips: bool = True, bos: bool = True
) -> Path:
    """Llama 2 style where it `strips` (a space is put before and taken off the text), else Gemma style."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(SAMPLE, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [token for token in model["vocab"] if token not in set("ö你")]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [(left, right) for left, right in model["merges"] if {left, right, left + right} <= vocab.keys()]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if strips else replace
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens[:3]])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return _save(tokenizer, directory, {**names, **(config or {})})


def _save(tokenizer: Tokenizer, directory: Path, config: dict[str, Any]) -> Path:
    tokenizer.add_tokens(ADDED)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory
