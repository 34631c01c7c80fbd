"""Vocabulary in the metadata of a GGUF file: tokens, their kinds, and the tokens that a prompt begins with.

Metadata that are missing, of another kind or contradictory raise `CorruptCheckpointError`.
"""

from collections.abc import Mapping
from enum import IntEnum

from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from tandem.core.errors import CorruptCheckpointError, UnsupportedCheckpointError
from tandem.models.gguf.file import GgufFile


class Kind(IntEnum):
    """Kinds of tokens, with GGUF's numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def read_tokens(file: GgufFile) -> list[str]:
    """All tokens, by id; no two are equal."""
    tokens = read_strings(file, "tokens")
    if len(set(tokens)) != len(tokens):
        raise CorruptCheckpointError(f"{file.path}: tokenizer.ggml.tokens has a token twice")
    return tokens


def read_id(file: GgufFile, name: str, num_tokens: int) -> int | None:
    """The token id under the key `tokenizer.ggml.{name}`; None if there is none."""
    value = file.metadata.get(f"tokenizer.ggml.{name}")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < num_tokens:
        raise CorruptCheckpointError(
            f"{file.path}: tokenizer.ggml.{name}={value!r} is no token; there are 0 to {num_tokens - 1}"
        )
    return value


def read_kinds(file: GgufFile, tokens: list[str]) -> list[int]:
    """The `Kind` of each token; all are normal if the file does not say."""
    kinds = file.metadata.get("tokenizer.ggml.token_type", [])
    if not isinstance(kinds, list) or len(kinds) not in (0, len(tokens)) or not all(isinstance(x, int) for x in kinds):
        raise CorruptCheckpointError(f"{file.path}: tokenizer.ggml.token_type must have one number a token")
    return [int(kind) for kind in kinds] or [Kind.NORMAL] * len(tokens)


def read_strings(file: GgufFile, name: str) -> list[str]:
    """The list of strings under the key `tokenizer.ggml.{name}`."""
    values = file.metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        found = "missing" if values is None else "no list of strings"
        raise CorruptCheckpointError(f"{file.path}: tokenizer.ggml.{name} is {found}; convert or download it again")
    return [str(value) for value in values]


def as_merge(file: GgufFile, text: str, vocabulary: Mapping[str, int]) -> tuple[str, str]:
    """The two tokens of a merge, from a text with the two and a space between them."""
    left, _, right = text.partition(" ")
    if not {left, right, left + right} <= vocabulary.keys():
        raise CorruptCheckpointError(f"{file.path}: tokenizer.ggml.merges has {text!r}, not all of which are tokens")
    return left, right


def read_flag(file: GgufFile, name: str, default: bool) -> bool:
    """The flag under the key `tokenizer.ggml.{name}`."""
    value = file.metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise CorruptCheckpointError(f"{file.path}: tokenizer.ggml.{name}={value!r} must be true or false")
    return value


def added(token: str, kind: int, *, rstrip: bool = False) -> AddedToken:
    """A token that is matched literally in a text; `rstrip`: together with the spaces after it."""
    return AddedToken(token, normalized=False, special=kind != Kind.USER_DEFINED, rstrip=rstrip)


def read_template(file: GgufFile, tokens: list[str], *, adds_bos: bool) -> TemplateProcessing | None:
    """Template that adds tokens before a text; None = it adds none. `adds_bos`: default of an absent `add_bos_token`.

    Raises:
        UnsupportedCheckpointError: the file adds a token after a text.
    """
    if read_flag(file, "add_eos_token", False):
        raise UnsupportedCheckpointError(
            f"{file.path}: tokenizer.ggml.add_eos_token=true is not served: a prompt would end before its answer"
        )
    if not read_flag(file, "add_bos_token", adds_bos):
        return None
    bos = read_id(file, "bos_token_id", len(tokens))
    if bos is None:
        raise CorruptCheckpointError(f"{file.path}: tokenizer.ggml.bos_token_id is missing, which a prompt begins with")
    name = tokens[bos]
    return TemplateProcessing(single=[name, "$A"], pair=[name, "$A", name, "$B"], special_tokens=[(name, bos)])
