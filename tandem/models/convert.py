"""Conversion of a checkpoint to another file format with the same bits: plain or losslessly compressed safetensors."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from tandem.core.errors import UnsupportedCheckpointError
from tandem.models.checkpoint import LOSSLESS, LOSSLESS_INDEX, SAFETENSORS, SAFETENSORS_INDEX, Checkpoint
from tandem.models.lossless.file import ENDING
from tandem.models.lossless.writer import TensorWriter
from tandem.models.output_directory import OutputDirectory

_RUN: Final = "conversion_run.json"
_PLAIN: Final = ".safetensors"


@dataclass(frozen=True, slots=True)
class Conversion:
    """Report of a conversion. `num_coded` of `num_tensors` tensors were compressed; bytes are sizes of weight files."""

    num_tensors: int
    num_coded: int
    bytes_before: int
    bytes_after: int


def convert(
    checkpoint: Checkpoint, target: Path, *, lossless: bool, on_bytes: Callable[[int], None] = lambda _: None
) -> Conversion:
    """Writes the directory `target`: each weight file converted, and all other files of the model copied.

    A run that was killed is continued by the next call with the same arguments, which skips complete files.

    Args:
        lossless: bfloat16 tensors are compressed; otherwise all tensors are plain.
        on_bytes: called on this thread with the number of tensor bytes finished since the last call.

    Raises:
        UnsupportedCheckpointError: a tensor cannot be written, or `lossless` and no tensor is bfloat16.
        CheckpointError: a file is damaged or cannot be written.
        ConfigurationError: `target` is not empty, or files of another conversion lie beside it.
    """
    outlines = {name: checkpoint.outline(name) for name in checkpoint.names}
    compressed = [name for name, outline in outlines.items() if lossless and outline.dtype == torch.bfloat16]
    if lossless and not compressed:
        found = ", ".join(sorted({str(outline.dtype).removeprefix("torch.") for outline in outlines.values()}))
        raise UnsupportedCheckpointError(
            f"{checkpoint.directory} has no bfloat16 tensors, only {found}, so --lossless gains nothing; leave it out"
        )
    states = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in checkpoint.paths]
    output = OutputDirectory(target, _RUN, {"lossless": lossless, "model": states})
    shards: dict[Path, list[str]] = {}
    for name in checkpoint.names:
        shards.setdefault(checkpoint.file_of(name), []).append(name)
    ending = ENDING if lossless else _PLAIN
    files = {path: _file_name(path, len(shards), ending) for path in shards}
    for path, names in shards.items():
        if (output.path / files[path]).is_file():
            on_bytes(sum(outlines[name].nbytes for name in names))
        else:
            writer = TensorWriter(checkpoint, names, lossless=lossless, on_bytes=on_bytes)
            output.write(files[path], writer.write)
    output.copy_others(checkpoint.directory)
    if len(shards) > 1:
        weight_map = {name: files[checkpoint.file_of(name)] for name in checkpoint.names}
        total = sum(outline.nbytes for outline in outlines.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        output.write_text(LOSSLESS_INDEX if lossless else SAFETENSORS_INDEX, json.dumps(index, indent=2) + "\n")
    before = sum(path.stat().st_size for path in checkpoint.paths)
    after = sum((output.path / name).stat().st_size for name in files.values())
    output.finish()
    return Conversion(len(outlines), len(compressed), before, after)


def _file_name(path: Path, num_files: int, ending: str) -> str:
    """Name of the weight file made from `path`."""
    if num_files == 1:
        return LOSSLESS if ending == ENDING else SAFETENSORS
    return path.name.removesuffix(ENDING).removesuffix(path.suffix).replace("pytorch_model", "model") + ending
