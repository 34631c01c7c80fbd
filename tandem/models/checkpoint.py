"""The tensors of a model directory, wherever they are: single file or shards; safetensors, lossless, or legacy PyTorch.

Views of `outline` say what to read; what is read is a view of a memory-mapped file wherever it can be. Whoever reads
tensors without keeping them says so with `touched`, and every so often the mappings are let go, so that reading a
checkpoint does not make it resident.
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
_RESIDENT_BYTES = 8 << 20
_MOST_RELEASES = (
    256  # while all is read once: each costs time for every tensor of the files, whose headers are read anew
)


class Checkpoint:
    """Args:
    directory: the model's, for messages.
    files: which file holds each tensor.
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
        """Every tensor, in alphabetical order."""
        return tuple(sorted(self._files))

    def outline(self, name: str) -> torch.Tensor:
        """The tensor's shape, strides and dtype, on the device `meta`; nothing of it is read."""
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
        """For weights that are to be read again and again, where they lie. A wish, see `huge_pages`."""
        for file in self._different_files:
            if file.is_mapped:
                cache_in_huge_pages(file.path)

    def touched(self, num_bytes: int) -> None:
        """Reports that about `num_bytes` were read from tensors that are not kept."""
        self._touched_bytes += num_bytes
        if self._touched_bytes >= self._resident_bytes:
            self.release()

    def release(self) -> None:
        """Lets go of every mapping that no tensor views any more."""
        self._touched_bytes = 0
        for file in self._different_files:
            file.close()


def open_checkpoint(directory: Path, *, allow_pickle: bool = False) -> Checkpoint:
    """The tensors in `directory`; safetensors are preferred to lossless ones, both to PyTorch files, a single file to
    shards.

    Args:
        allow_pickle: PyTorch files may be read.

    Raises:
        CheckpointError: there are no weights there that we read.
        UnsupportedCheckpointError: they are PyTorch files, which may not be read.
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
    """Every tensor of every shard that the index names; the index must not promise more."""
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
