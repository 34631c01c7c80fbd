"""Writer of a quantised checkpoint, one layer at a time.

The directory gets its final name once all files are written (`models.output_directory`). The same command continues a
killed run after the last complete layer.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tandem.models.output_directory import OutputDirectory

INDEX: Final = "model.safetensors.index.json"  # file that names the weight file of each tensor
_RUN, _REST_BYTES = "quantization_run.json", 1 << 30


class CheckpointWriter:
    """Writes the files of a quantised checkpoint.

    Args:
        target: the checkpoint's directory, which must not exist or be empty.
        run: everything that the result depends on; files of another run are refused.

    Raises:
        ConfigurationError: `target` is not empty, or files of another run lie beside it.
        CheckpointError: the directory cannot be written.
    """

    def __init__(self, target: Path, run: Mapping[str, Any]) -> None:
        self._output = OutputDirectory(target, _RUN, run)
        self.directory = self._output.path

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight files written so far."""
        return sum(path.stat().st_size for path in self.directory.glob("model-*.safetensors"))

    def layer_file(self, index: int) -> Path:
        """Path of the file for layer `index`."""
        return self.directory / f"model-layer-{index:05d}.safetensors"

    def read_layer(self, index: int) -> tuple[dict[str, torch.Tensor], str] | None:
        """Tensors of a layer and its notes; None = it is not written yet."""
        if not self.layer_file(index).is_file():
            return None
        return load_file(self.layer_file(index)), (self.directory / _notes(index)).read_text(encoding="utf-8")

    def write_layer(self, index: int, tensors: Mapping[str, torch.Tensor], notes: str) -> None:
        """Writes a layer. `notes`: text that `read_layer` returns; it is not part of the finished checkpoint."""
        self._output.write_text(_notes(index), notes)
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
        """Adds the tokenizer and other files from `source`, the configuration, the index and `texts`; then gives the
        directory its final name.
        """
        self._output.copy_others(source)
        self._output.write_text("config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")
        self._output.write_text(INDEX, self._index())
        for name, text in texts.items():
            self._output.write_text(name, text)
        self._output.finish([path.name for path in self.directory.glob(_notes("*"))])

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
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        self._output.write(path.name, lambda scratch: save_file(contiguous, scratch, metadata={"format": "pt"}))


def _notes(index: int | str) -> str:
    return f"quantization_layer_{index}.json"
