"""The tokenizer that GGUF's metadata describes, as `tokenizer.json` and `tokenizer_config.json`.

The files hold vocabulary and merges, but only the name of how text is split before merging (`tokenizer.ggml.pre`). The
table has those whose published tokenizer.json is known here; another one is refused, since a wrong split is silent.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer
from tokenizers.processors import PostProcessor

from tandem.core.errors import CorruptCheckpointError, UnsupportedCheckpointError
from tandem.models.gguf.file import GgufFile

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_WORD = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+END"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*END"
)
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT_4O = _WORD.replace("END", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?") + r"|\p{N}{1,3}|" + _REST
_TEKKEN = _WORD.replace("END", "") + r"|\p{N}|" + _REST
_CONTROL, _USER_DEFINED = 3, 4  # token types
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


@dataclass(frozen=True, slots=True)
class Split:
    """Pre-tokenisation: splits text into the pieces within which tokens are merged.

    Args:
        before: how it is cut.
        normalizer: what happens to it first.
        ignore_merges: a word that is a token is taken whole.
        adds_bos: what an absent `add_bos_token` means.
    """

    before: Callable[[], PreTokenizer]
    normalizer: Callable[[], Normalizer] | None = None
    ignore_merges: bool = False
    adds_bos: bool = False


def _gpt2() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _by_pattern(pattern: str) -> Callable[[], PreTokenizer]:
    return lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_OF_LLAMA3 = Split(_by_pattern(_LLAMA3), ignore_merges=True, adds_bos=True)
_OF_QWEN2 = Split(_by_pattern(_QWEN2), normalizers.NFC)
SPLITS = {
    "gpt-2": Split(_gpt2),
    "smollm": Split(_smollm),
    "llama-bpe": _OF_LLAMA3,
    "llama3": _OF_LLAMA3,
    "llama-v3": _OF_LLAMA3,
    "qwen2": _OF_QWEN2,
    "deepseek-r1-qwen": _OF_QWEN2,
    "gpt-4o": Split(_by_pattern(_GPT_4O)),
    "tekken": Split(_by_pattern(_TEKKEN), ignore_merges=True, adds_bos=True),
}


def tokenizer_json(file: GgufFile) -> str:
    """`tokenizer.json`.

    Raises:
        CorruptCheckpointError: metadata is missing, of the wrong kind, or contradicts itself.
        UnsupportedCheckpointError: a kind of tokenizer, or a split, that is not built here.
    """
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UnsupportedCheckpointError(
            f"{file.path}: tokenizer.ggml.model={kind!r} is not served from GGUF; supported: 'gpt2', byte-level BPE. "
            "Take the model's Hugging Face directory instead"
        )
    tokens, split = read_tokens(file), _find_split(file)
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [_merge(file, text, vocabulary) for text in _strings(file, "merges")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, byte_fallback=False, ignore_merges=split.ignore_merges)
    )
    if split.normalizer is not None:
        backend.normalizer = split.normalizer()
    backend.pre_tokenizer = split.before()
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(_added_tokens(file, tokens))
    backend.post_processor = _post_processor(file, tokens, split)
    return str(backend.to_str())


def tokenizer_config(file: GgufFile) -> dict[str, object]:
    """`tokenizer_config.json`: named tokens and the chat template."""
    tokens = read_tokens(file)
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for name, key in _NAMED.items():
        token_id = read_id(file, f"{key}_token_id", len(tokens))
        if token_id is not None:
            config[name] = tokens[token_id]
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    return config


def read_tokens(file: GgufFile) -> list[str]:
    """Every token, by id; all different."""
    tokens = _strings(file, "tokens")
    if len(set(tokens)) != len(tokens):
        raise CorruptCheckpointError(f"{file.path}: tokenizer.ggml.tokens has a token twice")
    return tokens


def read_id(file: GgufFile, name: str, num_tokens: int) -> int | None:
    """A token id under `tokenizer.ggml`; None where there is none."""
    value = file.metadata.get(f"tokenizer.ggml.{name}")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < num_tokens:
        raise CorruptCheckpointError(
            f"{file.path}: tokenizer.ggml.{name}={value!r} is no token; there are 0 to {num_tokens - 1}"
        )
    return value


def _find_split(file: GgufFile) -> Split:
    name = file.metadata.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or name not in SPLITS:
        raise UnsupportedCheckpointError(
            f"{file.path}: tokenizer.ggml.pre={name!r}: how this tokenizer splits text is not known here; supported: "
            f"{', '.join(SPLITS)}. Take the model's Hugging Face directory instead"
        )
    return SPLITS[name]


def _strings(file: GgufFile, name: str) -> list[str]:
    values = file.metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        found = "missing" if values is None else "no list of strings"
        raise CorruptCheckpointError(f"{file.path}: tokenizer.ggml.{name} is {found}; convert or download it again")
    return [str(value) for value in values]


def _merge(file: GgufFile, text: str, vocabulary: Mapping[str, int]) -> tuple[str, str]:
    left, _, right = text.partition(" ")
    if not {left, right, left + right} <= vocabulary.keys():
        raise CorruptCheckpointError(f"{file.path}: tokenizer.ggml.merges has {text!r}, not all of which are tokens")
    return left, right


def _added_tokens(file: GgufFile, tokens: list[str]) -> list[AddedToken]:
    """Tokens that are matched literally in a text: control tokens, which are special, and user-defined ones."""
    types = file.metadata.get("tokenizer.ggml.token_type", [])
    if not isinstance(types, list) or len(types) not in (0, len(tokens)):
        raise CorruptCheckpointError(f"{file.path}: tokenizer.ggml.token_type must have one number a token")
    return [
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _post_processor(file: GgufFile, tokens: list[str], split: Split) -> PostProcessor:
    if file.metadata.get("tokenizer.ggml.add_eos_token", False):
        raise UnsupportedCheckpointError(
            f"{file.path}: tokenizer.ggml.add_eos_token=true is not served: a prompt would end before its answer"
        )
    byte_level = processors.ByteLevel(trim_offsets=False)
    if not file.metadata.get("tokenizer.ggml.add_bos_token", split.adds_bos):
        return byte_level
    bos = read_id(file, "bos_token_id", len(tokens))
    if bos is None:
        raise CorruptCheckpointError(f"{file.path}: tokenizer.ggml.bos_token_id is missing, which a prompt begins with")
    name = tokens[bos]
    template = processors.TemplateProcessing(
        single=[name, "$A"], pair=[name, "$A", name, "$B"], special_tokens=[(name, bos)]
    )
    return processors.Sequence([byte_level, template])
