"""Reads prompts from a file of JSON lines, and reports lines that contain none.

Only a line feed ends a line: JSON text may contain any other separator unescaped.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.core.errors import InvalidRequestError, shown
from tandem.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt with its own sampling settings. `where`: its place in a file, for messages; "" = no file."""

    prompt: str | list[int]
    options: dict[str, Any] = field(default_factory=dict)
    where: str = ""


def read_prompts(path: Path) -> Iterator[Prompt]:
    """The prompts of `path` in order; empty lines are skipped, and so is a byte order mark.

    Raises:
        InvalidRequestError: the file cannot be read, or naming the first line that is no request.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"--file={path}: {error}; give a readable file of JSON lines in UTF-8") from error
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _parse(line, f"{path}, line {number}")


def _parse(line: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{where} is not JSON: {error}") from error
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), (str, list)):
        raise InvalidRequestError(f'{where} must be an object with "prompt": text or token ids')
    prompt = entry.pop("prompt")
    unknown = sorted(set(entry) - set(SamplingParams.__dataclass_fields__))
    if unknown:
        known = ", ".join(SamplingParams.__dataclass_fields__)
        raise InvalidRequestError(f"{where}: unknown sampling settings {shown(unknown)}; known are {known}")
    if isinstance(entry.get("logit_bias"), dict):
        entry["logit_bias"] = {_token_id(key): bias for key, bias in entry["logit_bias"].items()}
    return Prompt(prompt, entry, where)


def _token_id(key: str) -> int | str:
    """Parses a key of `logit_bias`, since JSON has only text for keys; `SamplingParams` refuses invalid ones."""
    return int(key) if key.isdecimal() and len(key) < 12 else key
