"""Small tokenizers of every kind that is served, each with the tokens that chat templates of the tests write."""

import json
from collections.abc import Callable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.helpers.tokenizers import SPECIAL_TOKENS

SAMPLE = [
    "The quick brown fox jumps over the lazy dogs. It's 1984, isn't it?",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))  # three",
    "いろはにほへと ちりぬるを 你好、世界 Привет мир",
]
ADDED = [
    AddedToken("lazy dogs", normalized=True, single_word=True),
    AddedToken("<mask>", special=True, lstrip=True, normalized=False),
    AddedToken("<after>", rstrip=True, normalized=False),
    AddedToken("<|im_", normalized=False),
]


def _byte_level(normalizer: normalizers.Normalizer | None = None, *, add_prefix_space: bool = False) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    made.decoder = decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        SAMPLE, trainers.BpeTrainer(vocab_size=450, initial_alphabet=alphabet, show_progress=False)
    )
    return made


def _byte_fallback(
    normalizer: normalizers.Normalizer | None = None, pre_tokenizer: pre_tokenizers.PreTokenizer | None = None
) -> Tokenizer:
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(SAMPLE, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [token for token in model["vocab"] if token not in set("ö你")]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [(left, right) for left, right in model["merges"] if {left, right, left + right} <= vocab.keys()]
    made = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    if normalizer is not None:
        made.normalizer = normalizer
    if pre_tokenizer is not None:
        made.pre_tokenizer = pre_tokenizer
    return made


def _spaces() -> normalizers.Normalizer:
    return normalizers.Replace(" ", "▁")


CHAT_TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": _byte_level,
    "byte level, prefix space": lambda: _byte_level(add_prefix_space=True),
    "byte level, NFC": lambda: _byte_level(normalizers.NFC()),
    "byte level, without case and accents": lambda: _byte_level(
        normalizers.Sequence([normalizers.NFKD(), normalizers.Lowercase(), normalizers.StripAccents()])
    ),
    "byte level, stripped": lambda: _byte_level(normalizers.Strip()),
    "byte fallback, prefix space": lambda: _byte_fallback(
        normalizers.Sequence([normalizers.Prepend("▁"), _spaces()])
    ),
    "byte fallback, split at spaces": lambda: _byte_fallback(
        _spaces(), pre_tokenizers.Split(" ", "merged_with_previous")
    ),
    "metaspace at the first": lambda: _byte_fallback(
        None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    ),
    "metaspace always": lambda: _byte_fallback(None, pre_tokenizers.Metaspace(prepend_scheme="always")),
    "metaspace, NFKC": lambda: _byte_fallback(normalizers.NFKC(), pre_tokenizers.Metaspace(prepend_scheme="never")),
}  # fmt: skip


def write_chat_tokenizer(path: Path, kind: str) -> None:
    """Writes the tokenizer files of a checkpoint. `kind`: of `CHAT_TOKENIZERS`."""
    made = CHAT_TOKENIZERS[kind]()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    made.add_tokens(ADDED)
    made.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
