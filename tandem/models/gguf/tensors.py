"""Tensors of a Hugging Face checkpoint made from those of a GGUF file: names, shapes and bytes, one at a time."""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from tandem.core.errors import CorruptCheckpointError
from tandem.models.gguf.architectures import find_architecture, find_targets
from tandem.models.gguf.decode import FLOATS, ITEM_BYTES, NAMES, changed, decoded
from tandem.models.gguf.families.base import Config, Floats, TargetTensor
from tandem.models.gguf.file import GgufFile, TensorEntry

_BYTES = "U8"  # what safetensors calls them
_LAYER = re.compile(r"blk\.(\d+)\.")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the checkpoint, and how to make it from the file: a `TargetTensor` applied to one of its tensors.

    Args:
        name, shape: as in the checkpoint.
        entry, others: tensors of the file; `change` gets the numbers of all of them.
        dtype: dtype of the floats that are written; None = the file's quantised blocks are written.
        rows: indices of the rows of `entry` to take, in order; None = all in their order.
        blocks: indices of the blocks of a row, in order; None = all in their order.
        change: computes the numbers from the file's; None = they are the file's.
    """

    name: str
    shape: tuple[int, ...]
    entry: TensorEntry
    others: tuple[TensorEntry, ...]
    dtype: str | None
    rows: NDArray[np.intp] | None
    blocks: NDArray[np.intp] | None
    change: Callable[..., Floats] | None

    @property
    def num_bytes(self) -> int:
        if self.dtype is not None:
            return prod(self.shape) * ITEM_BYTES[self.dtype]
        return self.entry.num_bytes // self.entry.shape[0] * self.shape[0]

    @property
    def header(self) -> tuple[str, tuple[int, ...], str, int]:
        """Name, shape, dtype and bytes for the header of a safetensors file."""
        if self.dtype is not None:
            return self.name, self.shape, NAMES[self.dtype], self.num_bytes
        shape = (self.shape[0], self.num_bytes // self.shape[0])
        return self.name, shape, _BYTES, self.num_bytes

    def write(self, file: GgufFile, target: BinaryIO) -> None:
        """Writes the tensor's bytes.

        Raises:
            CorruptCheckpointError: a value is not finite.
        """
        rows = self._rows(file)
        if self.dtype is None:
            target.write(rows.data)
            return
        type_name = self.entry.type_name
        if self.change is not None:
            sources = [(rows, self.entry), *((file.rows(entry), entry) for entry in self.others)]
            rows, type_name = changed(sources, self.change), "F32"
        for piece in decoded(rows, type_name, self.dtype, f"{file.path}: tensor {self.entry.name!r}"):
            target.write(piece)

    def _rows(self, file: GgufFile) -> NDArray[np.uint8]:
        rows = file.rows(self.entry)
        if self.rows is not None:
            rows = rows[self.rows]
        if self.blocks is None:
            return rows
        in_blocks = rows.reshape(len(rows), len(self.blocks), -1)
        return np.ascontiguousarray(in_blocks[:, self.blocks]).reshape(len(rows), -1)


def find_tensors(file: GgufFile, config: Config, dtype: str | None) -> list[Tensor]:
    """The tensors to write, in order; each tensor of a stack is written separately.

    Args:
        dtype: dtype to which all are decoded; None = quantised ones stay so, and floats keep their type.

    Raises:
        CheckpointError: a tensor that the architecture does not have, or that does not fit the configuration.
    """
    _, architecture = find_architecture(file)
    num_layers = config["num_hidden_layers"]
    assert isinstance(num_layers, int)
    found, left_out = [], 0
    for name, entry in file.tensors.items():
        if architecture.has_mtp and architecture.mtp_key is None and _layer(name) >= num_layers:
            left_out += 1
            continue
        for target in find_targets(file, architecture, name):
            parts = file.entries_of(entry) if target.is_stack else (entry,)
            found += [_tensor(file, part, index, target, config, dtype) for index, part in enumerate(parts)]
    if left_out:
        _log.info("%s: leaves out %d tensors of layers that predict further tokens", file.path.name, left_out)
    return found


def _layer(name: str) -> int:
    """Index of the layer of one of the file's tensors; -1: it belongs to no layer."""
    layer = _LAYER.match(name)
    return -1 if layer is None else int(layer[1])


def _tensor(
    file: GgufFile, entry: TensorEntry, index: int, target: TargetTensor, config: Config, dtype: str | None
) -> Tensor:
    """The tensor described by `target`. `index`: of `entry` in its stack."""
    shape, rows, blocks, change = entry.shape, None, None, target.change
    others = tuple(_find_other(file, entry.name, other) for other in target.others)
    try:
        if target.order is not None:
            rows = target.order(entry.shape[0], config)
            shape = (len(rows), *entry.shape[1:])
        if target.columns is not None:
            columns = target.columns(entry.shape[-1], config)
            blocks = _in_blocks(columns, entry.type_name)
            if blocks is None:
                change = _reordered(columns)
        if change is not None:
            shape = change(-np.ones(shape, np.float32), *(-np.ones(other.shape, np.float32) for other in others)).shape
    except (CorruptCheckpointError, ValueError) as error:  # NOTE: a ValueError: shapes that do not go together
        raise CorruptCheckpointError(f"{file.path}: tensor {entry.name!r}: {error}") from error
    written_as = _written_as(entry, change is not None) if dtype is None else dtype
    name = target.name.replace("{}", str(index))
    return Tensor(name, shape, entry, others, written_as, rows, blocks, change)


def _find_other(file: GgufFile, name: str, other: str) -> TensorEntry:
    """The tensor `other` of the same layer as tensor `name`."""
    layer = _LAYER.match(name)
    found = file.tensors.get(other if layer is None else f"{layer[0]}{other}")
    if found is None:
        raise CorruptCheckpointError(f"{file.path} has {name!r} and no {other!r} beside it; download it again")
    return found


def _in_blocks(columns: NDArray[np.intp], type_name: str) -> NDArray[np.intp] | None:
    """The order of a row's blocks equal to this order of columns; None: it would divide a block."""
    size, _ = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    by_block = columns.reshape(-1, size)
    starts = by_block[:, 0]
    if (starts % size).any() or (by_block - starts[:, None] != np.arange(size)).any():
        return None
    return starts // size


def _reordered(columns: NDArray[np.intp]) -> Callable[..., Floats]:
    return lambda values: values[:, columns]


def _written_as(entry: TensorEntry, is_changed: bool) -> str | None:
    """The dtype of written floats, float32 if `is_changed`; None: a matrix of quantised blocks. Vectors are always
    floats, whatever their type in the file.
    """
    if is_changed:
        return "float32"
    if entry.type_name in FLOATS:
        return FLOATS[entry.type_name]
    return None if len(entry.shape) > 1 else "float32"
