"""Lets pip inside a build reach what pip reaches outside: its configuration as a build secret, its folders as volumes.

Nothing of it ends up in an image: secrets and volumes exist only while a command of the build runs.
"""

import re
import subprocess
import sys
from ast import literal_eval
from dataclasses import dataclass
from pathlib import Path

SECRET_ID = "pip"
_LINE = re.compile(r"^(?P<section>[^.]*)\.(?P<key>[^=]+)=(?P<value>.*)$")
_PATHS = re.compile(r"(?:file://)?(/[^\s'\"]+)")
_NOT_PATHS = {"log", "cache-dir"}


@dataclass(frozen=True, slots=True)
class PipAccess:
    """`config`: text of a pip.conf. `folders`: existing local paths that it names."""

    config: str
    folders: tuple[Path, ...]

    def arguments(self, directory: Path) -> list[str]:
        """Flags for `buildah build`; the secret's file is written into `directory`, readable by us alone."""
        file = directory / "pip.conf"
        file.touch(mode=0o600)
        file.write_text(self.config)
        volumes = [flag for folder in self.folders for flag in ("--volume", f"{folder}:{folder}:ro")]
        return ["--secret", f"id={SECRET_ID},src={file}", *volumes]


def pip_access() -> PipAccess:
    """Result of `pip config list` here, variables over files."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return parse(done.stdout)


def parse(listing: str) -> PipAccess:
    """The settings of `pip config list`; the environment's win, those of one command are left out."""
    settings: dict[str, str] = {}
    for prefix in ("global", ":env:"):
        for line in listing.splitlines():
            match = _LINE.match(line)
            if match and match["section"] == prefix and match["key"] not in _NOT_PATHS:
                settings[match["key"]] = str(literal_eval(match["value"]))
    lines = [f"{key} = {_folded(value)}" for key, value in sorted(settings.items())]
    named = [Path(path) for value in settings.values() for path in _PATHS.findall(_without_urls(value))]
    return PipAccess(
        "\n".join(["[global]", *lines, ""]), tuple(sorted({_mount(path) for path in named if path.exists()}))
    )


def _folded(value: str) -> str:
    return "\n    ".join(value.split("\n"))


def _without_urls(value: str) -> str:
    """NOTE: `https://host/path` names no local path."""
    return re.sub(r"https?://\S+", "", value)


def _mount(path: Path) -> Path:
    """An index is mounted with the files beside it, which its pages link to."""
    return path.parent if path.name == "simple" else path
