"""The files of the cache of packed weights as a whole: which ones are deleted, and when."""

import logging
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open

ORIGIN = "checkpoint"  # key in a file's metadata for the path of the checkpoint
UNFINISHED = "packing-"  # prefix of files that are being written
_FREE_SHARE = 0.05  # of the disk that stays free
_KEPT_S = 30 * 86400.0  # a file is deleted so long after it was last loaded,
_ABANDONED_S = 86400.0  # or so long if its checkpoint is gone, or it was never finished
_IDLE_S = 86400.0  # and so long if the disk is nearly full

_log = logging.getLogger(__name__)


def make_room(directory: Path, num_bytes: int) -> None:
    """Deletes files that have not been loaded for long, and remains of killed writers. If a new file of `num_bytes`
    would leave less than a twentieth of the disk free, also those whose checkpoint is gone, then those not loaded for a
    day, the longest unused ones first. All others stay: deleting a file that a process has mapped frees nothing.

    Raises OSError if that is not enough.
    """
    for path, age_s in _by_age(directory.glob(f"{UNFINISHED}*")):
        if age_s > _ABANDONED_S:
            _delete(path, "it was never finished")
    files = _by_age(directory.glob("*.safetensors"))
    abandoned = {path for path, _ in files if not _has_origin(path)}
    for path, age_s in sorted(files, key=lambda file: file[0] not in abandoned):  # NOTE: by age among each
        if age_s > (_ABANDONED_S if path in abandoned else _KEPT_S):
            _delete(path, f"it was last loaded {age_s // 86400:.0f} days ago")
        elif (path in abandoned or age_s > _IDLE_S) and _missing_bytes(directory, num_bytes) > 0:
            _delete(path, "its disk is nearly full")
    if (missing := _missing_bytes(directory, num_bytes)) > 0:
        raise OSError(
            f"{num_bytes >> 20} MiB in {directory} would leave less than 5 % of its disk free,"
            f" {-(-missing >> 20)} MiB more must be free"
        )


def _missing_bytes(directory: Path, num_bytes: int) -> int:
    disk = shutil.disk_usage(directory)
    return num_bytes + int(_FREE_SHARE * disk.total) - disk.free


def _by_age(paths: Iterable[Path]) -> list[tuple[Path, float]]:
    """Files and the seconds since each was last loaded, the longest unused ones first."""
    ages = []
    for path in paths:
        with suppress(OSError):  # NOTE: another process deletes too
            ages.append((path, time.time() - path.stat().st_mtime))
    return sorted(ages, key=lambda each: -each[1])


def _has_origin(path: Path) -> bool:
    """Whether the checkpoint from which a file was made still exists; True if unknown."""
    try:
        with safe_open(path, framework="pt") as file:
            origin = (file.metadata() or {}).get(ORIGIN)
    except (SafetensorError, OSError):
        return False
    try:
        return origin is None or bool(Path(origin).stat())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # NOTE: another user's directory, which cannot be read
        return True


def _delete(path: Path, reason: str) -> None:
    with suppress(OSError):  # NOTE: another user's file, or another process deletes it too
        path.unlink()
        _log.info("deleted %s: %s", path, reason)
