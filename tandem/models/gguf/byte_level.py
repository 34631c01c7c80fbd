"""Byte-level BPE tokenizers (`gpt2`) of GGUF files. A file holds vocabulary and merges, but of the pre-tokenisation,
which splits a text before merging, only the name (`tokenizer.ggml.pre`).

The table has names whose published tokenizer.json is known; others are refused, since a wrong split goes unnoticed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from tandem.core.errors import UnsupportedCheckpointError
from tandem.models.gguf.file import GgufFile
from tandem.models.gguf.vocabulary import Kind, added, as_merge, read_kinds, read_strings, read_template, read_tokens

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
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r" ?[^\s\p{L}\p{N}]", r" ?[^\s\p{L}\p{M}\p{N}]")
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_TEKKEN = _WORD.replace("END", "") + r"|\p{N}|" + _REST
_KIMI = (
    r"[\p{Han}]+|"
    + _WORD.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace("END", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?")
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Split:
    """Pre-tokenisation: splits text into the pieces within which tokens are merged.

    Args:
        before: makes the pre-tokenizer that splits a text.
        normalizer: makes the normalizer that is applied first; None = none.
        ignore_merges: a word that is a token is taken whole.
        adds_bos: default of an absent `add_bos_token`.
    """

    before: Callable[[], PreTokenizer]
    normalizer: Callable[[], Normalizer] | None = None
    ignore_merges: bool = False
    adds_bos: bool = False


def _gpt2() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _by_pattern(*patterns: str) -> Callable[[], PreTokenizer]:
    """Splits by each pattern in turn, within the pieces left by the ones before."""
    return lambda: pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_OF_LLAMA3 = Split(_by_pattern(_LLAMA3), ignore_merges=True, adds_bos=True)
_OF_GLM4 = Split(_by_pattern(_LLAMA3), ignore_merges=True)
_OF_QWEN2 = Split(_by_pattern(_QWEN2), normalizers.NFC)
SPLITS = {
    "gpt-2": Split(_gpt2),
    "smollm": Split(_smollm),
    "llama-bpe": _OF_LLAMA3,
    "llama3": _OF_LLAMA3,
    "llama-v3": _OF_LLAMA3,
    "lfm2": _OF_LLAMA3,
    "falcon-h1": _OF_LLAMA3,
    "pixtral": _OF_LLAMA3,
    "glm4": _OF_GLM4,
    "chatglm-bpe": _OF_GLM4,
    "refact": Split(_smollm),
    "dbrx": Split(_by_pattern(_LLAMA3)),
    "qwen2": _OF_QWEN2,
    "deepseek-r1-qwen": _OF_QWEN2,
    "qwen35": Split(_by_pattern(_QWEN35), normalizers.NFC),
    "gpt-4o": Split(_by_pattern(_GPT_4O)),
    "minimax-m2": Split(_by_pattern(_GPT_4O)),
    "deepseek-v3": Split(_by_pattern(*_DEEPSEEK3)),
    "kimi-k2": Split(_by_pattern(_KIMI), ignore_merges=True),
    "tekken": Split(_by_pattern(_TEKKEN), ignore_merges=True, adds_bos=True),
}


def byte_level(file: GgufFile) -> tokenizers.Tokenizer:
    """The tokenizer of a GGUF file.

    Raises:
        CorruptCheckpointError: metadata is missing, of the wrong kind, or contradicts itself.
        UnsupportedCheckpointError: an unknown pre-tokenisation.
    """
    tokens, split = read_tokens(file), _find_split(file)
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [as_merge(file, text, vocabulary) for text in read_strings(file, "merges")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, byte_fallback=False, ignore_merges=split.ignore_merges)
    )
    if split.normalizer is not None:
        backend.normalizer = split.normalizer()
    backend.pre_tokenizer = split.before()
    backend.decoder = decoders.ByteLevel()
    kinds = zip(tokens, read_kinds(file, tokens), strict=True)
    backend.add_tokens([added(token, kind) for token, kind in kinds if kind in (Kind.CONTROL, Kind.USER_DEFINED)])
    of_bytes = processors.ByteLevel(trim_offsets=False)
    template = read_template(file, tokens, adds_bos=split.adds_bos)
    backend.post_processor = of_bytes if template is None else processors.Sequence([of_bytes, template])
    return backend


def _find_split(file: GgufFile) -> Split:
    name = file.metadata.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or name not in SPLITS:
        raise UnsupportedCheckpointError(
            f"{file.path}: tokenizer.ggml.pre={name!r}: how this tokenizer splits text is not known here; supported: "
            f"{', '.join(SPLITS)}. Take the model's Hugging Face directory instead"
        )
    return SPLITS[name]
