"""Cache of packed weights: files with a copy of a model's weights in the layout that the CPU kernels read fastest, one
for a model or for each rank's part of it. The first process that needs a file writes it; all others map it.

A file can be deleted at any time. Its name is a digest of its checkpoint's state on disk. If it cannot be written, the
original weights are used, with the same results. A process that writes one deletes old ones (`packed_files`); processes
that have one mapped keep it.
"""

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from tandem.architecture.model import HEAD, ModelSpec
from tandem.architecture.tensors import Source, TensorSpec
from tandem.compute.huge_pages import advise_huge_pages, cache_in_huge_pages
from tandem.compute.weights.base import PackedForm, Weight, WeightFormat
from tandem.core.errors import CheckpointError
from tandem.models.checkpoint import Checkpoint
from tandem.models.file_lock import locked
from tandem.models.load_plan import LoadingPlan, dtype_of, num_bytes_of
from tandem.models.packed_files import ORIGIN, UNFINISHED, make_room
from tandem.models.safetensors_header import safetensors_header
from tandem.models.weight_files import SafetensorsFile
from tandem.models.weights import Sources, load_pieces, load_tensor

LEAST_BYTES = 8 << 20  # of a file; smaller ones are not made, since nothing is gained
_CPU = torch.device("cpu")
_NAMES = {  # names of dtypes in safetensors
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int8: "I8",
    torch.uint8: "U8",
}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PackedFile:
    """Cache file of the packed weights of a model, or of one rank's part. `origin`: a file of the checkpoint it is made
    from. `sources`: by a spec's name, the part of a stored tensor with its numbers. `weights`: spec, stored format and
    packed form of each weight. `dtype`: of the model, such as "bfloat16".
    """

    path: Path
    origin: Path
    sources: Sources
    weights: tuple[tuple[TensorSpec, WeightFormat, PackedForm], ...]
    dtype: str

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, plan: LoadingPlan, sources: Sources, spec: ModelSpec, directory: Path
    ) -> "PackedFile | None":
        """The cache file for a model; None = the model cannot be packed, or it is too small."""
        weights = _packed_weights(plan, spec.dtype)
        if weights is None:
            return None
        states = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in checkpoint.paths]
        layouts = "+".join(sorted({form.layout for _, _, form in weights}))
        shard = (
            []
            if spec.head_tokens is None
            else [(each.name, str(each.source), _columns(each)) for each, _, _ in weights]
        )
        key = hashlib.sha256(json.dumps([layouts, spec.fingerprint, states, *shard]).encode()).hexdigest()[:32]
        origin = checkpoint.paths[0].resolve()
        file = cls(directory / f"{key}.safetensors", origin, sources, weights, spec.dtype)
        return file if file.num_bytes >= LEAST_BYTES else None

    def load(self, checkpoint: Checkpoint) -> dict[str, Weight]:
        """Packed weights by name, from the file, which is written first if needed, or awaited if another process writes
        it. Empty, with a warning in the log, if it cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with locked(self.path.with_suffix(".lock")):
                found = self._read()
                if found is None:
                    self._write(checkpoint)
                    found = self._read()
        except (OSError, CheckpointError) as error:
            _log.warning("weights are not packed, answers take longer: %s; TANDEM_CACHE_DIR names the directory", error)
            return {}
        return found or {}

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes_of(tensor, self.dtype) for tensor in self._stored())

    def _stored(self) -> Iterator[TensorSpec]:
        """The tensors in the file, in order."""
        for weight, _, form in self.weights:
            yield from form.stored(weight)

    def _read(self) -> dict[str, Weight] | None:
        """Reads the file; None if it does not exist or is damaged."""
        if not self.path.is_file():
            return None
        with suppress(OSError):  # NOTE: another user's file, which this one may only read
            os.utime(self.path)
        cache_in_huge_pages(self.path)
        file = SafetensorsFile(self.path)
        tensors: dict[str, torch.Tensor] = {}
        try:
            for spec in self._stored():
                tensor = file.tensor(spec.name)
                if tuple(tensor.shape) != spec.shape or tensor.dtype != dtype_of(spec, self.dtype):
                    return None
                advise_huge_pages(tensor)
                tensors[spec.name] = tensor
        except CheckpointError as error:
            _log.warning("packed weights are made anew: %s", error)
            return None
        return {
            weight.name: form.load(weight, {spec.name: tensors[spec.name] for spec in form.stored(weight)})
            for weight, _, form in self.weights
        }

    def _write(self, checkpoint: Checkpoint) -> None:
        make_room(self.path.parent, self.num_bytes)
        began_s = time.monotonic()
        _log.info("packing %d MiB of weights into %s, once", self.num_bytes >> 20, self.path)
        with tempfile.NamedTemporaryFile(dir=self.path.parent, prefix=UNFINISHED, delete=False) as file:
            try:
                file.write(safetensors_header(map(self._entry, self._stored()), {ORIGIN: str(self.origin)}))
                for weight, weight_format, form in self.weights:
                    pieces = load_pieces(
                        checkpoint, weight, weight_format, self.sources, partial(self._part, checkpoint)
                    )
                    for tensor in form.pack(weight, pieces):
                        file.write(tensor.view(torch.uint8).numpy().data)
                file.flush()
                os.fsync(file.fileno())
                Path(file.name).replace(self.path)
                _log.info("packed %d MiB in %.1f s", self.num_bytes >> 20, time.monotonic() - began_s)
            finally:
                Path(file.name).unlink(missing_ok=True)  # NOTE: it still has that name only if something failed

    def _part(self, checkpoint: Checkpoint, spec: TensorSpec, source: Source) -> torch.Tensor:
        return load_tensor(checkpoint, source, dtype_of(spec, self.dtype), _CPU)

    def _entry(self, spec: TensorSpec) -> tuple[str, tuple[int, ...], str, int]:
        return spec.name, spec.shape, _NAMES[dtype_of(spec, self.dtype)], num_bytes_of(spec, self.dtype)


def _columns(weight: TensorSpec) -> tuple[int, int] | None:
    """Columns of its tensor in the checkpoint that a shard's weight has; None = all."""
    return None if weight.source is None else weight.source.within


def _packed_weights(plan: LoadingPlan, dtype: str) -> tuple[tuple[TensorSpec, WeightFormat, PackedForm], ...] | None:
    """All weights except small ones; None if one cannot be packed, since calls that fuse products need all their
    weights packed. The output head is multiplied alone, so it may be left out.
    """
    found = []
    for weight, weight_format in plan.weights:
        form = weight_format.packed
        if weight.is_float32 or weight.is_small:
            continue
        reason = f"no packed form of {weight_format.name}" if form is None else form.refusal(weight, dtype)
        if form is not None and reason is None:
            found.append((weight, weight_format, form))
        elif weight.name != HEAD:
            _log.debug("weights are not packed: %s", reason)
            return None
    return tuple(found)
