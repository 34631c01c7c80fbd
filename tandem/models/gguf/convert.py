"""A GGUF file to a Hugging Face directory in the cache: made once for each content and dtype, whole or not at all.

Weights are decoded to 16 bits a tensor at a time. The directory is a copy that can be deleted at any time; who makes
one deletes those that nobody has used for long.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import BinaryIO

from tandem.core.errors import CheckpointError, CorruptCheckpointError
from tandem.models.file_lock import locked
from tandem.models.gguf.architectures import checkpoint_name, find_architecture, in_halves, read_config
from tandem.models.gguf.decode import ITEM_BYTES, NAMES, decoded
from tandem.models.gguf.file import GgufFile, TensorEntry
from tandem.models.gguf.tokenizer import read_id, read_tokens, tokenizer_config, tokenizer_json
from tandem.models.safetensors_header import safetensors_header

_VERSION = "1"  # of what is made of a file
_USUAL_DTYPE = "bfloat16"
_KEPT_S = 30 * 86400.0  # after it was last asked for
_ABANDONED_S = 86400.0
_UNFINISHED = "converting-"
_FREE_SHARE = 1.1  # of its size, that the disk must have free
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}

_log = logging.getLogger(__name__)


def converted(path: Path, cache_dir: Path, *, dtype: str = "auto", has_weights: bool = True) -> Path:
    """The Hugging Face directory of the GGUF file `path`, made first if need be.

    Args:
        cache_dir: where it is kept.
        dtype: of the weights; auto = bfloat16.
        has_weights: they are wanted too, not only configuration, tokenizer and chat template.

    Raises:
        CheckpointError: the file cannot be served exactly (see its subclasses), or the cache cannot be written.
    """
    kind = (dtype if dtype in NAMES else _USUAL_DTYPE) if has_weights else "text"
    target = cache_dir / f"{_digest(path)}-{kind}"
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with locked(target.with_suffix(".lock")):
            if target.is_dir():
                with suppress(OSError):  # NOTE: somebody else's, which we may read
                    os.utime(target)
                return target
            _make(path, target, kind, has_weights)
            _delete_old(cache_dir)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be converted into {target} ({error}); make room there or name another directory by "
            "TANDEM_CACHE_DIR"
        ) from error
    return target


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise CorruptCheckpointError(f"{path} cannot be read: {error}") from error
    return hashlib.sha256(_VERSION.encode() + content).hexdigest()[:32]


def _make(path: Path, target: Path, dtype: str, has_weights: bool) -> None:
    began_s = time.monotonic()
    with GgufFile(path) as file, _unfinished(target) as directory:
        config = read_config(file, dtype if has_weights else _USUAL_DTYPE)
        _write_json(directory / "tokenizer_config.json", tokenizer_config(file))
        (directory / "tokenizer.json").write_text(tokenizer_json(file), encoding="utf-8")
        _write_json(directory / "generation_config.json", _generation_config(file))
        _write_json(directory / "config.json", config)
        if has_weights:
            num_bytes = sum(prod(entry.shape) for entry in file.tensors.values()) * ITEM_BYTES[dtype]
            _log.info("converting %s to %s (%d MiB) in %s, once", path.name, dtype, num_bytes >> 20, target.parent)
            _check_free(target.parent, num_bytes)
            with (directory / "model.safetensors").open("wb") as weights:
                _write_weights(file, config, dtype, weights)
    if has_weights:
        _log.info("converted %s in %.1f s", path.name, time.monotonic() - began_s)


@contextmanager
def _unfinished(target: Path) -> Iterator[Path]:
    """A new directory that is called `target` once the block has ended well, and is gone if it has not."""
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
    num_tokens = len(read_tokens(file))
    ends = [token_id for name in _ENDS if (token_id := read_id(file, name, num_tokens)) is not None]
    sampling = {theirs: file.metadata.get(f"general.sampling.{ours}") for ours, theirs in _SAMPLING.items()}
    return {
        "eos_token_id": sorted(set(ends)),
        **{name: value for name, value in sampling.items() if value is not None},
    }


def _check_free(directory: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < _FREE_SHARE * num_bytes:
        raise OSError(f"{free >> 20} MiB are free, {num_bytes >> 20} are needed")


def _write_weights(file: GgufFile, config: dict[str, object], dtype: str, weights: BinaryIO) -> None:
    _, architecture = find_architecture(file)
    entries: dict[str, TensorEntry] = {}
    for name, entry in file.tensors.items():
        theirs = checkpoint_name(file, architecture, name)
        if theirs is not None:
            entries[theirs] = entry
    tensors = [(name, entry.shape, prod(entry.shape) * ITEM_BYTES[dtype]) for name, entry in entries.items()]
    weights.write(safetensors_header(tensors, NAMES[dtype], {"format": "pt"}))
    for entry in entries.values():
        rows = in_halves(file.rows(entry), entry.name, architecture, config)
        for piece in decoded(rows, entry.type_name, dtype, f"{file.path}: tensor {entry.name!r}"):
            weights.write(piece)
    weights.flush()
    os.fsync(weights.fileno())


def _delete_old(cache_dir: Path) -> None:
    """What nobody has asked for in long, and what writers left who were killed."""
    for path in cache_dir.iterdir():
        kept_s = _ABANDONED_S if path.name.startswith(_UNFINISHED) else _KEPT_S
        with suppress(OSError):  # NOTE: another process deletes too
            if path.is_dir() and time.time() - path.stat().st_mtime > kept_s:
                _log.info("deleting %s, not used for %d days", path, kept_s // 86400)
                # NOTE: never half of a finished one under its name, which whoever finds it would take for whole
                unfinished = cache_dir / f"{_UNFINISHED}{path.name.removeprefix(_UNFINISHED)}"
                path.rename(unfinished)
                shutil.rmtree(unfinished)
