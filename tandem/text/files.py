"""Reads the JSON files of a checkpoint's tokenizer.

Invariant: a file that is too large, unreadable, damaged or misshapen raises CorruptCheckpointError; so does a missing
one, except where it is optional. Only the files' shape is interpreted here: an object, its strings, and the special
tokens it names.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.core.errors import CorruptCheckpointError

MAX_TOKENIZER_BYTES = 256 * 2**20  # of tokenizer.json
MAX_CONFIG_BYTES = 32 * 2**20  # of each other file
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

JsonObject = dict[str, Any]


def read_text(path: Path, max_bytes: int) -> str:
    """Reads a file as UTF-8 text.

    Raises:
        CorruptCheckpointError: it is missing, unreadable, larger than `max_bytes` or not UTF-8.
    """
    try:
        size_bytes = path.stat().st_size
        if size_bytes > max_bytes:
            raise CorruptCheckpointError(f"{path} has {size_bytes} bytes; at most {max_bytes} are accepted")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CorruptCheckpointError(f"{path} is not UTF-8 ({error}); download it again") from error
    except OSError as error:
        raise CorruptCheckpointError(f"{path} cannot be read: {error}") from error


def parse_object(text: str, path: Path) -> JsonObject:
    """Parses `text` of the file `path`. Raises CorruptCheckpointError naming it if that is no JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise CorruptCheckpointError(f"{path} holds a JSON {type(value).__name__}, where an object is expected")
    return value


def read_optional_object(path: Path) -> JsonObject:
    """The JSON object in `path`, or an empty one where there is no such file; at most `MAX_CONFIG_BYTES` long."""
    if not path.exists():
        return {}
    value = parse_object(read_text(path, MAX_CONFIG_BYTES), path)
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise CorruptCheckpointError(f"{path} spells a string that is not Unicode ({error}); correct it") from error
    return value


def read_tokenizer_config(directory: Path) -> JsonObject:
    """Reads `tokenizer_config.json`; entries of older checkpoints' `special_tokens_map.json` override it.

    As transformers does, the second file counts only where the first has no `added_tokens_decoder`.
    """
    config = read_optional_object(directory / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= read_optional_object(directory / "special_tokens_map.json")
    return config


def token_content(value: Any) -> str | None:
    """The text of a token given as a string or as an object with `content`; None for anything else."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens (`bos_token`, `eos_token`, ...) a tokenizer configuration sets."""
    return _contents({name: config.get(name) for name in NAMED_TOKENS})


def template_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that a chat template may mention by name: the named ones and the model's own.

    The model's own are under other keys that end with `_token`, or entries of `extra_special_tokens` where that is an
    object; as in transformers, an entry wins over a key.
    """
    extra = extra_tokens(config)
    keys = {name: value for name, value in config.items() if name.endswith("_token")}
    return _contents(keys) | (_contents(extra) if isinstance(extra, Mapping) else {})


def extra_tokens(config: Mapping[str, Any]) -> Any:
    """The special tokens without a key of their own, a list or an object, under any of the names they have had."""
    return config.get("extra_special_tokens") or config.get("additional_special_tokens") or []


def _contents(values: Mapping[str, Any]) -> dict[str, str]:
    """The texts of the tokens among `values`; others are left out."""
    found = {name: token_content(value) for name, value in values.items()}
    return {name: content for name, content in found.items() if content is not None}
