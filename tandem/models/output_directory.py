"""Directory of a model that is written file by file, under a temporary name until it is complete.

Each file is renamed once its bytes are on disk, and so is the directory. A run that is killed leaves complete files,
from which the next one continues, and never half a checkpoint under the final name.
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
    """Writer of a model directory.

    Args:
        target: final directory, which must not exist or be empty.
        run_file: name of a file that holds `run` until the directory is complete.
        run: everything that the result depends on; files of another run are refused.

    Raises:
        ConfigurationError: `target` is not empty, or files of another run lie beside it.
        CheckpointError: the directory cannot be written.
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
        """Writes a file with the function `write`, which gets a temporary path.

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
            raise CheckpointError(
                f"{path} cannot be written ({error}); make room and give the same command again: it goes on from here"
            ) from error
        finally:
            scratch.unlink(missing_ok=True)  # NOTE: it still has that name only if something failed

    def write_text(self, name: str, text: str) -> None:
        """Writes a file of text. Raises OSError."""
        scratch = self.path / f"{name}.writing"
        scratch.write_text(text, encoding="utf-8")
        _to_disk(scratch)
        scratch.replace(self.path / name)

    def copy_others(self, source: Path) -> None:
        """Copies all files of a model except its weights: configuration, tokenizer, chat templates and any others."""
        for file in source.iterdir():
            if file.name in _FOLDERS and file.is_dir():
                shutil.copytree(file, self.path / file.name, dirs_exist_ok=True)
            elif file.is_file() and file.suffix not in _WEIGHTS and not file.name.endswith(".index.json"):
                shutil.copyfile(file, self.path / file.name)

    def finish(self, notes: Iterable[str] = ()) -> None:
        """Gives the directory its final name, and deletes the run's file and the files `notes` from it."""
        check_target(self.target)
        self.path.rename(self.target)
        for name in (self._run_file.name, *notes):
            (self.target / name).unlink()


def check_target(target: Path) -> None:
    """Raises `ConfigurationError` if `target` exists and is not an empty directory."""
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists():
        raise ConfigurationError(f"--out={target} exists and is not an empty directory; name another, or delete it")


def _to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
