"""A checkpoint that is written one layer at a time, in a directory of its own until it is whole.

Each file gets its name once its bytes are on the disk, and so does the directory: a run that is killed leaves whole
files, which the next one goes on from, and never half a checkpoint under the name that was asked for.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tandem.core.errors import CheckpointError, ConfigurationError

INDEX: Final = "model.safetensors.index.json"
_RUN, _REST_BYTES = "quantization_run.json", 1 << 30
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


class CheckpointWriter:
    """Args:
    target: the checkpoint's directory, which must not exist or be empty.
    run: what the result depends on; files of another run are refused.

    Raises:
        ConfigurationError: there is something in `target`, or files of another run beside it.
        CheckpointError: nothing can be written there.
    """

    def __init__(self, target: Path, run: Mapping[str, Any]) -> None:
        check_target(target)
        self._target = target
        self.directory = target.with_name(f"{target.name}.partial")
        self._begin(json.dumps(run, indent=2, sort_keys=True))

    def _begin(self, run: str) -> None:
        file = self.directory / _RUN
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            found = file.read_text(encoding="utf-8") if file.is_file() else None
            if found is None and not any(self.directory.glob("model-*.safetensors")):
                self._write_text(_RUN, run)
                return
        except OSError as error:
            raise CheckpointError(
                f"{self.directory} cannot be written ({error}); name a directory that can be by --out"
            ) from error
        if found != run:
            raise ConfigurationError(
                f"{self.directory} is of a run with other settings, another text or another model; delete it, or name "
                f"another directory by --out (now {self._target})"
            )

    @property
    def num_bytes(self) -> int:
        """Size of the written files of weights."""
        return sum(path.stat().st_size for path in self.directory.glob("model-*.safetensors"))

    def layer_file(self, index: int) -> Path:
        """Path of a layer's file."""
        return self.directory / f"model-layer-{index:05d}.safetensors"

    def read_layer(self, index: int) -> tuple[dict[str, torch.Tensor], str] | None:
        """Tensors of a layer and its notes; None = it is not written yet."""
        if not self.layer_file(index).is_file():
            return None
        return load_file(self.layer_file(index)), (self.directory / _notes(index)).read_text(encoding="utf-8")

    def write_layer(self, index: int, tensors: Mapping[str, torch.Tensor], notes: str) -> None:
        """Writes a layer. `notes`: text returned by `read_layer`; it is no part of the checkpoint."""
        self._write_text(_notes(index), notes)
        self._write_tensors(self.layer_file(index), tensors)

    def write_rest(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Writes tensors outside the layers, in files of about a GiB."""
        pending: dict[str, torch.Tensor] = {}
        num_bytes, number = 0, 0
        for name, tensor in tensors.items():
            if pending and num_bytes + tensor.nbytes > _REST_BYTES:
                self._write_tensors(self._rest_file(number), pending)
                pending, num_bytes, number = {}, 0, number + 1
            pending[name] = tensor
            num_bytes += tensor.nbytes
        self._write_tensors(self._rest_file(number), pending)

    def finish(self, source: Path, config: Mapping[str, Any], texts: Mapping[str, str]) -> None:
        """Adds tokenizer and the like from `source`, configuration, index and other files; gives the directory its
        name.
        """
        for file in source.iterdir():
            is_copied = file.is_file() and file.suffix not in _WEIGHTS and not file.name.endswith(".index.json")
            if is_copied and file.name != "config.json":
                shutil.copyfile(file, self.directory / file.name)
        self._write_text("config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")
        self._write_text(INDEX, self._index())
        for name, text in texts.items():
            self._write_text(name, text)
        check_target(self._target)
        self.directory.rename(self._target)
        for path in (self._target / _RUN, *self._target.glob(_notes("*"))):
            path.unlink()

    def _index(self) -> str:
        places: dict[str, str] = {}
        total = 0
        for path in sorted(self.directory.glob("model-*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    places[name] = path.name
                    total += file.get_tensor(name).nbytes
        return json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n"

    def _rest_file(self, number: int) -> Path:
        return self.directory / f"model-rest-{number:05d}.safetensors"

    def _write_tensors(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        scratch = path.with_suffix(".writing")
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        try:
            save_file(contiguous, scratch, metadata={"format": "pt"})
            _to_disk(scratch)
            scratch.replace(path)
        except OSError as error:
            scratch.unlink(missing_ok=True)
            raise CheckpointError(
                f"{path} cannot be written ({error}); make room and give the same command again: it goes on from here"
            ) from error

    def _write_text(self, name: str, text: str) -> None:
        scratch = self.directory / f"{name}.writing"
        scratch.write_text(text, encoding="utf-8")
        _to_disk(scratch)
        scratch.replace(self.directory / name)


def _notes(index: int | str) -> str:
    return f"quantization_layer_{index}.json"


def check_target(target: Path) -> None:
    """Raises `ConfigurationError` where something would be overwritten."""
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists():
        raise ConfigurationError(f"--out={target} exists and is not an empty directory; name another, or delete it")


def _to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
