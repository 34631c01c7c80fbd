"""Conversion of a GGUF file to a Hugging Face directory in the cache: made once for each content, completely or not at
all.

Quantised weights stay GGUF blocks, under Hugging Face's names and in its order of rows, or are decoded to floats, one
tensor at a time. The directory is a copy that can be deleted at any time. Each conversion also deletes directories that
were not used for 30 days.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import BinaryIO, Protocol

from tandem.architecture.fields import shown_items
from tandem.core.errors import CheckpointError, CorruptCheckpointError
from tandem.models.file_lock import locked
from tandem.models.gguf import VERSION
from tandem.models.gguf.architectures import find_architecture
from tandem.models.gguf.configuration import read_config
from tandem.models.gguf.file import GgufFile
from tandem.models.gguf.parts import part_paths
from tandem.models.gguf.source import GgufSource, MappedFile
from tandem.models.gguf.tensors import Tensor, find_tensors
from tandem.models.gguf.tokenizer import tokenizer_config, tokenizer_json
from tandem.models.gguf.vocabulary import read_id, read_tokens
from tandem.models.safetensors_header import safetensors_header

_USUAL_DTYPE, _CODES = "bfloat16", "codes"  # codes: weights stay quantised
_KEPT_S = 30 * 86400.0  # a directory is deleted so long after it was last used
_ABANDONED_S = 86400.0  # the same for an unfinished one
_UNFINISHED = "converting-"
_FREE_SHARE = 1.1  # free space that the disk must have, relative to the weights' size
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_SAMPLING_PREFIX = "general.sampling."
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}

_log = logging.getLogger(__name__)


class Files(Protocol):
    """Access to the files of a model by name, on disk or elsewhere."""

    def digest(self, path: Path) -> bytes:
        """Digest that identifies the content of a file. Raises OSError if there is no such file."""

    def open(self, path: Path) -> GgufSource: ...


class LocalFiles:
    """`Files` on disk."""

    def digest(self, path: Path) -> bytes:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()

    def open(self, path: Path) -> GgufSource:
        return MappedFile(path)


def converted(
    path: Path,
    cache_dir: Path,
    *,
    files: Files | None = None,
    decoded_to: str | None = None,
    has_weights: bool = True,
    sampling: Mapping[str, float] | None = None,
) -> Path:
    """The Hugging Face directory of the GGUF file `path`, made first if needed.

    Args:
        cache_dir: directory that holds converted directories.
        files: access to the file and the other files of a split model; None = on disk.
        decoded_to: dtype to which quantised numbers are decoded; None = they stay quantised.
        has_weights: whether weights are needed too, not only configuration, tokenizer and chat template.
        sampling: recommended options, as in a `generation_config.json`, for a file that holds none.

    Raises:
        CheckpointError: the file cannot be served exactly (see its subclasses), or the cache cannot be written.
    """
    kind = (decoded_to or _CODES) if has_weights else "text"
    options, files = dict(sampling or {}), files or LocalFiles()
    target = cache_dir / f"{_digest(files, path, options)}-{kind}"
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with locked(target.with_suffix(".lock")):
            if target.is_dir():
                with suppress(OSError):  # NOTE: another user's directory, which this one may only read
                    os.utime(target)
                return target
            _make(files, path, target, decoded_to, has_weights, options)
            _delete_old(cache_dir)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be converted into {target} ({error}); make room there or name another directory by "
            "TANDEM_CACHE_DIR"
        ) from error
    return target


def _digest(files: Files, path: Path, sampling: Mapping[str, float]) -> str:
    try:
        content = b"".join(map(files.digest, part_paths(path)))
    except OSError as error:
        raise CorruptCheckpointError(
            f"{path} cannot be read: {error}; a model in parts needs all of them in one directory"
        ) from error
    options = json.dumps(sampling, sort_keys=True).encode() if sampling else b""
    return hashlib.sha256(VERSION.encode() + content + options).hexdigest()[:32]


def _make(
    files: Files, path: Path, target: Path, dtype: str | None, has_weights: bool, sampling: Mapping[str, float]
) -> None:
    began_s = time.monotonic()
    with GgufFile(path, files.open) as file, _unfinished(target) as directory:
        config = read_config(file, dtype or _USUAL_DTYPE)
        tensors = find_tensors(file, config, dtype)
        if dtype is None:
            config["quantization_config"] = _quantisation(tensors)
        _write_json(directory / "tokenizer_config.json", tokenizer_config(file))
        (directory / "tokenizer.json").write_text(tokenizer_json(file), encoding="utf-8")
        _write_json(directory / "generation_config.json", {**sampling, **_generation_config(file)})
        _write_json(directory / "config.json", config)
        if has_weights:
            num_bytes = sum(tensor.num_bytes for tensor in tensors)
            _log.info("converting %s (%d MiB) in %s, once", path.name, num_bytes >> 20, target.parent)
            _check_free(target.parent, num_bytes)
            with (directory / "model.safetensors").open("wb") as weights:
                _write_weights(file, tensors, weights)
    if has_weights:
        _log.info("converted %s in %.1f s", path.name, time.monotonic() - began_s)


@contextmanager
def _unfinished(target: Path) -> Iterator[Path]:
    """A new directory that is renamed to `target` when the block ends, or deleted if it fails."""
    directory = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=target.parent))
    try:
        yield directory
        directory.chmod(0o755)
        directory.replace(target)
    finally:
        shutil.rmtree(directory, ignore_errors=True)  # NOTE: it still has that name only if something failed


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")


def _generation_config(file: GgufFile) -> dict[str, object]:
    tokens, (_, architecture) = read_tokens(file), find_architecture(file)
    ends = [token_id for name in _ENDS if (token_id := read_id(file, name, len(tokens))) is not None]
    ends += [token_id for token_id, token in enumerate(tokens) if token in architecture.ends]
    given = {key: value for key, value in file.metadata.items() if key.startswith(_SAMPLING_PREFIX)}
    sampling = {theirs: given.pop(f"{_SAMPLING_PREFIX}{ours}", None) for ours, theirs in _SAMPLING.items()}
    others = {key: value for key, value in given.items() if value}
    if others:
        _log.warning(
            "%s: %s: not applied to answers, and requests have no such options", file.path, shown_items(others)
        )
    return {
        "eos_token_id": sorted(set(ends)),
        **{name: value for name, value in sampling.items() if value is not None},
    }


def _check_free(directory: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < _FREE_SHARE * num_bytes:
        raise OSError(f"{free >> 20} MiB are free, {num_bytes >> 20} are needed")


def _quantisation(tensors: Sequence[Tensor]) -> dict[str, object]:
    """The `quantization_config`: by type, names of quantised tensors, and numbers of elements of all matrices."""
    names: dict[str, list[str]] = defaultdict(list)
    numbers: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.dtype is None:
            names[tensor.entry.type_name].append(tensor.name)
        if len(tensor.shape) > 1:
            numbers[tensor.entry.type_name] += prod(tensor.shape)
    return {"quant_method": "gguf", "numbers": dict(numbers), "tensors": dict(names)}


def _write_weights(file: GgufFile, tensors: Sequence[Tensor], weights: BinaryIO) -> None:
    weights.write(safetensors_header([tensor.header for tensor in tensors], {"format": "pt"}))
    for tensor in tensors:
        tensor.write(file, weights)
    weights.flush()
    os.fsync(weights.fileno())


def _delete_old(cache_dir: Path) -> None:
    """Deletes directories that were not used for long, and unfinished ones left by killed processes."""
    for path in cache_dir.iterdir():
        max_age_s = _ABANDONED_S if path.name.startswith(_UNFINISHED) else _KEPT_S
        with suppress(OSError):  # NOTE: another process deletes too
            if path.is_dir() and time.time() - path.stat().st_mtime > max_age_s:
                _log.info("deleting %s, not used for %d days", path, max_age_s // 86400)
                # NOTE: renamed first, so that a half-deleted directory is never found under a finished one's name
                unfinished = cache_dir / f"{_UNFINISHED}{path.name.removeprefix(_UNFINISHED)}"
                path.rename(unfinished)
                shutil.rmtree(unfinished)
