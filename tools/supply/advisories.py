"""Advisories in the OSV format, read from a folder or a zip file, and which of them a version is affected by.

Read are PyPI's, as the Python Packaging Advisory Database and OSV export them. Source of the rules:
https://ossf.github.io/osv-schema/#evaluation
"""

import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

_ECOSYSTEM = "PyPI"
_FIRST = Version("0.dev0")
_SUFFIXES = (".json", ".yaml")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # NOTE: the first is libyaml's, ten times as fast


@dataclass(frozen=True, slots=True)
class Finding:
    """One advisory that a pinned version is affected by. `aliases`: its other ids, as CVE-…, and `fixed`: versions."""

    package: str
    version: str
    id: str
    aliases: tuple[str, ...]
    fixed: tuple[str, ...]
    summary: str

    @property
    def ids(self) -> frozenset[str]:
        return frozenset((self.id, *self.aliases))


@dataclass(frozen=True, slots=True)
class _Affected:
    """Part of an advisory about one package. `ranges`: of each, (version, kind) of its events, ordered by version."""

    id: str
    aliases: tuple[str, ...]
    fixed: tuple[str, ...]
    summary: str
    versions: frozenset[Version]
    ranges: tuple[tuple[tuple[Version, str], ...], ...]

    @classmethod
    def parse(cls, record: Mapping[str, Any], affected: Mapping[str, Any]) -> "_Affected":
        """Ranges of commits are left out."""
        ranges = [each["events"] for each in affected.get("ranges", ()) if each["type"] == "ECOSYSTEM"]
        return cls(
            id=record["id"],
            aliases=tuple(record.get("aliases", ())),
            fixed=tuple(event["fixed"] for events in ranges for event in events if "fixed" in event),
            summary=(record.get("summary") or record.get("details") or "").strip().partition("\n")[0],
            versions=frozenset(filter(None, map(_version, affected.get("versions", ())))),
            ranges=tuple(tuple(sorted(_events(events))) for events in ranges),
        )

    def includes(self, version: Version) -> bool:
        return version in self.versions or any(_is_in_range(events, version) for events in self.ranges)


class Advisories:
    """Args:
    records: objects of the OSV format; those that were withdrawn are left out.

    Raises:
        ValueError: one is not of that format.
    """

    def __init__(self, records: Iterable[Mapping[str, Any]]) -> None:
        self._by_package: dict[str, list[_Affected]] = {}
        self._changed: list[datetime] = []
        for record in records:
            try:
                self._add(record)
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                raise ValueError(f"{record.get('id')} is no advisory of the OSV format ({error!r})") from error

    @classmethod
    def read(cls, path: Path) -> "Advisories":
        """Every advisory below the folder, or in the zip file, `path`.

        Raises:
            ValueError: a file is no advisory, or there is none.
        """
        advisories = cls(_zipped(path) if path.is_file() else _files(path))
        if not len(advisories):
            raise ValueError(f"{path} has no advisories (*.json or *.yaml of the OSV format)")
        return advisories

    def __len__(self) -> int:
        return len(self._changed)

    def newest(self, now: datetime) -> datetime:
        """Time of the last change of any advisory, up to `now`: some bear times that are still to come."""
        return max((each for each in self._changed if each <= now), default=datetime.min.replace(tzinfo=UTC))

    def findings(self, package: str, version: Version) -> list[Finding]:
        """Of `package`, a canonical name. A local version, as 2.13.0+cpu, is affected as the public one is."""
        public = Version(version.public)
        return [
            Finding(package, str(version), each.id, each.aliases, each.fixed, each.summary)
            for each in self._by_package.get(package, ())
            if each.includes(public)
        ]

    def _add(self, record: Mapping[str, Any]) -> None:
        self._changed.append(_time(record["modified"]))
        if "withdrawn" in record:
            return
        for affected in record.get("affected", ()):
            package = affected.get("package", {})
            if package.get("ecosystem") == _ECOSYSTEM:
                name = canonicalize_name(package["name"])
                self._by_package.setdefault(name, []).append(_Affected.parse(record, affected))


def _is_in_range(events: Iterable[tuple[Version, str]], version: Version) -> bool:
    is_inside = False
    for at, kind in events:
        if kind == "introduced" and version >= at:
            is_inside = True
        elif (kind == "fixed" and version >= at) or (kind == "last_affected" and version > at):
            is_inside = False
    return is_inside


def _events(events: Iterable[Mapping[str, str]]) -> Iterator[tuple[Version, str]]:
    """Events of a range. An invalid version, as 2.6.0-NA, ends no range and begins one with the first version."""
    for event in events:
        for kind, text in event.items():
            at = _FIRST if text == "0" else _version(text)
            if at is not None:
                yield at, kind
            elif kind == "introduced":
                yield _FIRST, kind


def _files(directory: Path) -> Iterator[Mapping[str, Any]]:
    for path in sorted(directory.rglob("*")):
        if path.suffix in _SUFFIXES:
            yield _record(path.read_text(), str(path))


def _zipped(path: Path) -> Iterator[Mapping[str, Any]]:
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.endswith(_SUFFIXES):
                yield _record(archive.read(name).decode(), f"{path}:{name}")


def _record(text: str, name: str) -> Mapping[str, Any]:
    try:
        record = json.loads(text) if name.endswith(".json") else yaml.load(text, _LOADER)
    except (yaml.YAMLError, json.JSONDecodeError) as error:
        raise ValueError(f"{name} is no advisory of the OSV format ({error})") from error
    if not isinstance(record, dict) or "id" not in record or "modified" not in record:
        raise ValueError(f"{name} is no advisory of the OSV format: it has no id or no time of change")
    return record


def _version(text: str) -> Version | None:
    """None for what PEP 440 does not know; old advisories list some."""
    try:
        return Version(text)
    except InvalidVersion:
        return None


def _time(value: str | datetime) -> datetime:
    """NOTE: YAML makes times of what JSON leaves as text."""
    time = value if isinstance(value, datetime) else datetime.fromisoformat(value.replace("Z", "+00:00"))
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)
