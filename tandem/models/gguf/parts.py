"""File names of a GGUF model split into several files, as `llama-gguf-split` names them: `m-00001-of-00003.gguf`."""

import re
from pathlib import Path

_PART = re.compile(r"(.+)-\d{5}-of-(?!00000)(\d{5})")


def part_paths(path: Path) -> list[Path]:
    """Paths of all files of a split model, given any of them; the path itself if the model is not split."""
    named = _PART.fullmatch(path.stem)
    if named is None:
        return [path]
    base, count = named.groups()
    return [path.with_name(f"{base}-{index:05d}-of-{count}{path.suffix}") for index in range(1, int(count) + 1)]


def whole_name(path: Path) -> str:
    """Name of the model: the file's name without ending and number."""
    named = _PART.fullmatch(path.stem)
    return path.stem if named is None else named[1]
