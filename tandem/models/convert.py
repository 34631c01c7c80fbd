"""A checkpoint to another file format with the same bits: safetensors, plain or with lossless bfloat16."""

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
    """Report of a conversion. `num_coded` of `num_tensors` tensors are coded; bytes are those of files of weights."""

    num_tensors: int
    num_coded: int
    bytes_before: int
    bytes_after: int


def convert(
    checkpoint: Checkpoint, target: Path, *, lossless: bool, on_bytes: Callable[[int], None] = lambda _: None
) -> Conversion:
    """Writes the directory `target`: each file of weights anew, and all else of the model as it is.

    A run that was killed goes on behind the files that it wrote, if the same is asked for again.

    Args:
        lossless: bfloat16 tensors are coded; otherwise all are plain.
        on_bytes: called with the bytes of tensors that were dealt with since.

    Raises:
        UnsupportedCheckpointError: a tensor that cannot be written, or none that would be coded.
        CheckpointError: a damaged file, or one that cannot be written.
        ConfigurationError: `target` is not empty, or half of another conversion lies beside it.
    """
    outlines = {name: checkpoint.outline(name) for name in checkpoint.names}
    coded = [name for name, outline in outlines.items() if lossless and outline.dtype == torch.bfloat16]
    if lossless and not coded:
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
    return Conversion(len(outlines), len(coded), before, after)


def _file_name(path: Path, num_files: int, ending: str) -> str:
    """That of a file of weights made from `path`."""
    if num_files == 1:
        return LOSSLESS if ending == ENDING else SAFETENSORS
    return path.name.removesuffix(ENDING).removesuffix(path.suffix).replace("pytorch_model", "model") + ending
