"""Pins of a requirements file, as constraints.txt or a lock: name, version, marker and hashes of each package."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
DIRECTORY = ROOT / "requirements"
_HASH = "--hash="


@dataclass(frozen=True, slots=True)
class Pin:
    """Args:
    name: canonical, as `pydantic-core`.
    marker: the environments that it is for; None = all.
    hashes: as `sha256:…`, of each file that may be installed.
    """

    name: str
    version: Version
    marker: Marker | None
    hashes: tuple[str, ...]


def lock_files() -> tuple[Path, ...]:
    """Every lock of this checkout."""
    return tuple(sorted(DIRECTORY.glob("*.lock")))


def read_pins(path: Path) -> tuple[Pin, ...]:
    """In the file's order.

    Raises:
        ValueError: a line is no `name==version`; it is named.
    """
    return tuple(_pin(line, path) for line in _logical_lines(path))


def _logical_lines(path: Path) -> Iterator[str]:
    """Without comments; lines that end with a backslash are joined to the next."""
    joined = path.read_text().replace("\\\n", " ")
    return (line for each in joined.splitlines() if (line := each.partition("#")[0].strip()))


def _pin(line: str, path: Path) -> Pin:
    words = line.split(_HASH)
    try:
        requirement = Requirement(words[0])
        (specifier,) = requirement.specifier
    except (InvalidRequirement, ValueError) as error:
        raise ValueError(f"{path}: {line!r} is no pin; write name==version") from error
    if specifier.operator != "==" or specifier.version.endswith(".*"):
        raise ValueError(f"{path}: {line!r} is no pin; write name==version")
    name = canonicalize_name(requirement.name)
    return Pin(name, Version(specifier.version), requirement.marker, tuple(word.strip() for word in words[1:]))
