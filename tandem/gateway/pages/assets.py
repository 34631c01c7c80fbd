"""The static files of the pages, ours in `static` and third-party ones in `vendor`, read once.

Invariant: every file's URL contains a digest of all files, so that modules of different versions are never mixed and
files may be cached for ever.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_FOLDERS = ("static", "vendor")
_DIGEST_MARK = b"{{digest}}"


@dataclass(frozen=True, slots=True)
class Asset:
    """A file and its content type."""

    content_type: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Assets:
    """All files by name, without folder. `digest`: a hash of their contents, as 16 hexadecimal digits."""

    digest: str
    by_name: Mapping[str, Asset]

    @classmethod
    def load(cls) -> "Assets":
        """Reads the files of this package and replaces `{{digest}}` in them by the digest."""
        package = files(__package__)
        entries = (entry for folder in _FOLDERS for entry in package.joinpath(folder).iterdir())
        found = {entry.name: entry.read_bytes() for entry in entries}
        digest = hashlib.sha256()
        for name in sorted(found):
            digest.update(name.encode() + b"\0" + found[name] + b"\0")
        version = digest.hexdigest()[:16]
        named = {name: body.replace(_DIGEST_MARK, version.encode()) for name, body in found.items()}
        return cls(version, {name: Asset(_type_of(name), body) for name, body in named.items()})


def _type_of(name: str) -> str:
    return _TYPES[name[name.rindex(".") :]]
