"""A model's directory that is written file by file, under another name until it is whole.

Each file gets its name once its bytes are on the disk, and so does the directory: a run that is killed leaves whole
files, which the next one goes on from, and never half a checkpoint under the name that was asked for.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tandem.core.errors import CheckpointError, ConfigurationError

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_FOLDERS = ("additional_chat_templates",)


class OutputDirectory:
    """Args:
    target: the directory that was asked for, which must not exist or be empty.
    run_file: name of the file that says `run` while the directory is not whole.
    run: what the result depends on; files of another run are refused.

    Raises:
        ConfigurationError: there is something in `target`, or files of another run beside it.
        CheckpointError: nothing can be written there.
    """

    def __init__(self, target: Path, run_file: str, run: Mapping[str, Any]) -> None:
        check_target(target)
        self.target = target
        self.path = target.with_name(f"{target.name}.partial")
        self._run_file = self.path / run_file
        self._begin(json.dumps(run, indent=2, sort_keys=True))

    def _begin(self, run: str) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            found = self._run_file.read_text(encoding="utf-8") if self._run_file.is_file() else None
            if found is None and not any(self.path.glob("*.safetensors")):
                self.write_text(self._run_file.name, run)
                return
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be written ({error}); name a directory that can be by --out"
            ) from error
        if found != run:
            raise ConfigurationError(
                f"{self.path} is of a run with other settings, another text or another model; delete it, or name "
                f"another directory by --out (now {self.target})"
            )

    def write(self, name: str, write: Callable[[Path], None]) -> None:
        """Writes a file by a function of the path that it has until it is whole.

        Raises:
            CheckpointError: it cannot be written.
        """
        path = self.path / name
        scratch = path.with_suffix(".writing")
        try:
            write(scratch)
            _to_disk(scratch)
            scratch.replace(path)
        except OSError as error:
            scratch.unlink(missing_ok=True)
            raise CheckpointError(
                f"{path} cannot be written ({error}); make room and give the same command again: it goes on from here"
            ) from error

    def write_text(self, name: str, text: str) -> None:
        """Writes a file of text. Raises OSError."""
        scratch = self.path / f"{name}.writing"
        scratch.write_text(text, encoding="utf-8")
        _to_disk(scratch)
        scratch.replace(self.path / name)

    def copy_others(self, source: Path) -> None:
        """Copies all of a model but its weights: configuration, tokenizer, chat templates, and what else is there."""
        for file in source.iterdir():
            if file.name in _FOLDERS and file.is_dir():
                shutil.copytree(file, self.path / file.name, dirs_exist_ok=True)
            elif file.is_file() and file.suffix not in _WEIGHTS and not file.name.endswith(".index.json"):
                shutil.copyfile(file, self.path / file.name)

    def finish(self, notes: Iterable[str] = ()) -> None:
        """Gives the directory the name that was asked for, and deletes the run's file and `notes` from it."""
        check_target(self.target)
        self.path.rename(self.target)
        for name in (self._run_file.name, *notes):
            (self.target / name).unlink()


def check_target(target: Path) -> None:
    """Raises `ConfigurationError` where something would be overwritten."""
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists():
        raise ConfigurationError(f"--out={target} exists and is not an empty directory; name another, or delete it")


def _to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
