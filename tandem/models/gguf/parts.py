"""Names of the files of a GGUF model in parts, as `llama-gguf-split` gives them: `m-00001-of-00003.gguf`."""

import re
from pathlib import Path

_PART = re.compile(r"(.+)-\d{5}-of-(?!00000)(\d{5})")


def part_paths(path: Path) -> list[Path]:
    """All files, given any of them; the file itself where its name is of no part."""
    named = _PART.fullmatch(path.stem)
    if named is None:
        return [path]
    base, count = named.groups()
    return [path.with_name(f"{base}-{index:05d}-of-{count}{path.suffix}") for index in range(1, int(count) + 1)]


def whole_name(path: Path) -> str:
    """The name without ending and number."""
    named = _PART.fullmatch(path.stem)
    return path.stem if named is None else named[1]
