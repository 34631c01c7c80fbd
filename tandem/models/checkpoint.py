"""Checkpoint: the tensors of a model directory, in a single file or shards; safetensors, lossless (compressed
safetensors), or legacy PyTorch.

`outline` returns a tensor without its numbers; a view of it says which part to `read`. Results are views of a
memory-mapped file if possible. Code that reads tensors without keeping them reports it with `touched`; the mappings are
then released from time to time, so that reading a checkpoint does not make it resident in memory.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from tandem.architecture.fields import Fields, read_json_object
from tandem.compute.huge_pages import cache_in_huge_pages
from tandem.core.errors import CheckpointError, CorruptCheckpointError
from tandem.models.lossless.file import ENDING, LosslessFile
from tandem.models.pickles import pickle_refused
from tandem.models.weight_files import SafetensorsFile, TorchFile, WeightFile

SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
LOSSLESS, LOSSLESS_INDEX = f"model{ENDING}", f"model{ENDING}.index.json"
TORCH, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_KINDS = ((SAFETENSORS, SAFETENSORS_INDEX), (LOSSLESS, LOSSLESS_INDEX), (TORCH, TORCH_INDEX))
_RESIDENT_BYTES = 8 << 20  # bytes read before mappings are released, at least
_MOST_RELEASES = 256  # while a checkpoint is read once: after each, the headers of all files are read again


class Checkpoint:
    """Tensors of a model directory by name. Another name raises `KeyError`.

    Args:
        directory: directory of the model, for messages.
        files: the file that holds each tensor.
    """

    def __init__(self, directory: Path, files: Mapping[str, WeightFile]) -> None:
        self.directory = directory
        self._files = files
        self._different_files = tuple(dict.fromkeys(files.values()))
        num_bytes = sum(path.stat().st_size for path in self.paths)
        self._resident_bytes = max(_RESIDENT_BYTES, num_bytes // _MOST_RELEASES)
        self._touched_bytes = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, in alphabetical order."""
        return tuple(sorted(self._files))

    def outline(self, name: str) -> torch.Tensor:
        """The tensor's shape, strides and dtype, as a tensor on the device `meta`; none of its numbers are read."""
        return self._files[name].outline(name)

    def read(self, name: str, outline: torch.Tensor) -> torch.Tensor:
        """The numbers of `outline`, which is `outline(name)` or a view of it, as stored; they must not be written."""
        return self._files[name].read(name, outline)

    def tensor(self, name: str) -> torch.Tensor:
        """The whole tensor as it is stored; it must not be written."""
        return self.read(name, self.outline(name))

    def file_of(self, name: str) -> Path:
        """Path of the file that holds a tensor."""
        return self._files[name].path

    @property
    def paths(self) -> tuple[Path, ...]:
        """Paths of its files."""
        return tuple(sorted(file.path for file in self._different_files))

    def cache_in_huge_pages(self) -> None:
        """Requests huge pages for the files' page cache, for weights used in place. A hint, see `huge_pages`."""
        for file in self._different_files:
            if file.is_mapped:
                cache_in_huge_pages(file.path)

    def touched(self, num_bytes: int) -> None:
        """Reports that about `num_bytes` were read from tensors that are not kept."""
        self._touched_bytes += num_bytes
        if self._touched_bytes >= self._resident_bytes:
            self.release()

    def release(self) -> None:
        """Drops every file mapping that no tensor views any more."""
        self._touched_bytes = 0
        for file in self._different_files:
            file.close()


def open_checkpoint(directory: Path, *, allow_pickle: bool = False) -> Checkpoint:
    """Opens the weights in `directory`. Safetensors are preferred to lossless files, both to PyTorch files, and a
    single file to shards.

    Args:
        allow_pickle: PyTorch files may be read.

    Raises:
        CheckpointError: the directory has no weights in a known format.
        UnsupportedCheckpointError: there are only PyTorch files, which may not be read.
        CorruptCheckpointError: a file is damaged, or an index does not agree with the shards.
    """
    for name, index_name in _KINDS:
        if (directory / name).is_file():
            file = _weight_file(directory / name, allow_pickle)
            return Checkpoint(directory, dict.fromkeys(file.names(), file))
        if (directory / index_name).is_file():
            return Checkpoint(directory, _read_shards(directory, index_name, allow_pickle))
    expected = ", ".join(name for names in _KINDS for name in names)
    found = ", ".join(sorted(path.name for path in directory.iterdir())[:20]) or "nothing"
    raise CheckpointError(f"{directory} has no weights: one of {expected} is needed, found {found}")


def _weight_file(path: Path, allow_pickle: bool) -> WeightFile:
    if path.name.endswith(ENDING):
        return LosslessFile(path)
    if path.suffix == ".safetensors":
        return SafetensorsFile(path)
    if not allow_pickle:
        raise pickle_refused(path)
    return TorchFile(path)


def _read_shards(directory: Path, index_name: str, allow_pickle: bool) -> dict[str, WeightFile]:
    """The shard of every tensor in all shards that the index names. Tensors that only the index has are an error."""
    weight_map = _read_weight_map(directory / index_name)
    shards = {name: _open_shard(directory, name, index_name, allow_pickle) for name in sorted(set(weight_map.values()))}
    contents = {name: frozenset(shard.names()) for name, shard in shards.items()}
    absent = [tensor for tensor, name in weight_map.items() if tensor not in contents[name]]
    if absent:
        raise CorruptCheckpointError(
            f"{directory / index_name} places {absent[0]} in {weight_map[absent[0]]}, which does not have it "
            f"({len(absent)} tensors in all); download the shards again"
        )
    return {tensor: shard for name, shard in shards.items() for tensor in contents[name]}


def _read_weight_map(path: Path) -> dict[str, str]:
    fields = Fields(read_json_object(path), path.name)
    weight_map = fields.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptCheckpointError(f"{path}: weight_map must be an object that names every tensor's file")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise CorruptCheckpointError(
                f"{path}: weight_map names {file!r}; file names in this directory are expected"
            )
    return weight_map


def _open_shard(directory: Path, name: str, index_name: str, allow_pickle: bool) -> WeightFile:
    path = directory / name
    if not path.is_file():
        raise CorruptCheckpointError(f"{path} is missing, though {index_name} names it; download it again")
    return _weight_file(path, allow_pickle)
