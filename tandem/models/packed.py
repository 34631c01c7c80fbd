"""A model's matrices as its kernels want them, in a file: written by whoever needs it first, mapped by every process.

The file is a copy that can be deleted at any time. It belongs to one checkpoint as it lies on disk; where it cannot be
had, the matrices are served as they are, with the same bits. Whoever writes one deletes those that nobody has loaded
for long, or for a day where their checkpoint is gone; that takes nothing from a process that has one mapped.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from tandem.architecture.model import EMBEDDING, HEAD, ModelSpec
from tandem.architecture.tensors import TensorSpec
from tandem.compute.arena import TORCH_DTYPES
from tandem.compute.huge_pages import advise_huge_pages, cache_in_huge_pages
from tandem.compute.ops import Kernels, PackedWeight
from tandem.core.errors import CheckpointError
from tandem.models.checkpoint import Checkpoint
from tandem.models.file_lock import locked
from tandem.models.safetensors_header import safetensors_header
from tandem.models.weight_files import SafetensorsFile
from tandem.models.weights import Sources, load_parameter

LEAST_BYTES = 8 << 20  # below this nothing is gained
_LAYOUT = "strips-of-16/1"
_FREE_SHARE = 1.1  # of its size, that the disk must have free
_KEPT_S = 30 * 86400.0  # after it was last loaded
_ABANDONED_S = 86400.0  # after it was last written to, or loaded where its checkpoint is gone
_ORIGIN = "checkpoint"  # in the file's metadata
_UNFINISHED = "packing-"
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}  # safetensors'

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PackedFile:
    """Where it is to be, of which file of a checkpoint's, and of which parameters: the tensor and the shape of each."""

    path: Path
    origin: Path
    sources: Sources
    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, sources: Sources, spec: ModelSpec, kernels: Kernels, directory: Path
    ) -> "PackedFile | None":
        """None: the kernels do not pack such a model, or it is too small."""
        dtype = TORCH_DTYPES[spec.dtype]
        shapes = {tensor.name: tensor.shape for tensor in spec.tensors() if _is_packed(tensor)}
        head = shapes.pop(HEAD, shapes.pop(EMBEDDING))
        if not all(kernels.can_pack(shape, dtype) for shape in shapes.values()):
            return None
        if kernels.can_pack(head, dtype):
            shapes[HEAD] = head
        states = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in checkpoint.paths]
        key = hashlib.sha256(json.dumps([_LAYOUT, spec.fingerprint, states]).encode()).hexdigest()[:32]
        found = {name: sources[name] if name in sources else sources[EMBEDDING] for name in shapes}
        file = cls(directory / f"{key}.safetensors", checkpoint.paths[0].resolve(), found, shapes, dtype)
        return file if file.num_bytes >= LEAST_BYTES else None

    def load(self, checkpoint: Checkpoint, kernels: Kernels) -> dict[str, torch.Tensor]:
        """The packed parameters by name, from the file, which is written first if need be; none where it cannot be."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with locked(self.path.with_suffix(".lock")):
                found = self._read()
                if found is None:
                    self._write(checkpoint, kernels)
                    _delete_old(self.path.parent)
                    found = self._read()
        except (OSError, CheckpointError) as error:
            _log.warning("weights are not packed, answers take longer: %s; make the directory writable", error)
            return {}
        return found or {}

    @property
    def num_bytes(self) -> int:
        return sum(rows * columns for rows, columns in self.shapes.values()) * self.dtype.itemsize

    def _read(self) -> dict[str, torch.Tensor] | None:
        """None: there is no such file, or a damaged one."""
        if not self.path.is_file():
            return None
        with suppress(OSError):  # NOTE: somebody else's, which we may read: then they say when it was loaded
            os.utime(self.path)
        cache_in_huge_pages(self.path)
        file = SafetensorsFile(self.path)
        found: dict[str, torch.Tensor] = {}
        try:
            for name, shape in self.shapes.items():
                tensor = file.tensor(name)
                if tuple(tensor.shape) != shape or tensor.dtype != self.dtype:
                    return None
                advise_huge_pages(tensor)
                found[name] = PackedWeight.of(tensor)
        except CheckpointError as error:
            _log.warning("packed weights are made anew: %s", error)
            return None
        return found

    def _write(self, checkpoint: Checkpoint, kernels: Kernels) -> None:
        free = shutil.disk_usage(self.path.parent).free
        if free < _FREE_SHARE * self.num_bytes:
            raise OSError(f"{self.path.parent} has {free >> 20} MiB free, {self.num_bytes >> 20} are needed")
        began_s = time.monotonic()
        _log.info("packing %d MiB of weights into %s, once", self.num_bytes >> 20, self.path)
        with tempfile.NamedTemporaryFile(dir=self.path.parent, prefix=_UNFINISHED, delete=False) as file:
            try:
                tensors = [(name, shape, prod(shape) * self.dtype.itemsize) for name, shape in self.shapes.items()]
                file.write(safetensors_header(tensors, _NAMES[self.dtype], {_ORIGIN: str(self.origin)}))
                for source in self.sources.values():
                    weight = load_parameter(checkpoint, source, self.dtype, torch.device("cpu"))
                    file.write(kernels.pack(weight).view(torch.uint8).numpy().data)
                    num_bytes = weight.nbytes
                    del weight
                    checkpoint.touched(num_bytes)
                file.flush()
                os.fsync(file.fileno())
                Path(file.name).replace(self.path)
                _log.info("packed %d MiB in %.1f s", self.num_bytes >> 20, time.monotonic() - began_s)
            finally:
                Path(file.name).unlink(missing_ok=True)  # NOTE: it still has that name only if something failed


def _is_packed(tensor: TensorSpec) -> bool:
    return len(tensor.shape) == 2 and not (tensor.is_float32 or tensor.is_small or tensor.is_lookup)


def _delete_old(directory: Path) -> None:
    """What nobody has loaded for long, and what writers left who were killed."""
    for path in directory.glob("*.safetensors"):
        _delete(path, _KEPT_S if _has_origin(path) else _ABANDONED_S)
    for path in directory.glob(f"{_UNFINISHED}*"):
        _delete(path, _ABANDONED_S)


def _has_origin(path: Path) -> bool:
    """Whether the checkpoint that a file was made of is still there; True where nobody can tell."""
    try:
        with safe_open(path, framework="pt") as file:
            origin = (file.metadata() or {}).get(_ORIGIN)
    except (SafetensorError, OSError):
        return False
    try:
        return origin is None or bool(Path(origin).stat())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # NOTE: somebody else's, where we may not look
        return True


def _delete(path: Path, kept_s: float) -> None:
    with suppress(OSError):  # NOTE: another process deletes too
        age_s = time.time() - path.stat().st_mtime
        if age_s > kept_s:
            _log.info("deleting %s, not used for %d days", path, age_s // 86400)
            path.unlink()
