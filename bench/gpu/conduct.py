"""Runs parts one after the other, each in a process of its own within its time, and writes down how each one ended.

A part that crashes, hangs or poisons the device does not end the others. What it had found is on disk already.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from bench.gpu.results import SectionResults
from bench.gpu.sections import Part
from bench.gpu.setting import Setting

LEAST_S = 15.0  # with less left, a part is not begun
TAIL_CHARACTERS = 2500
LOG = "gpu.log"


def conduct(parts: Sequence[Part], setting: Setting, folder: Path, deadline_s: float) -> bool:
    """Whether all went well: no error, no wrong check is for the caller to look up in the results.

    `deadline_s`: seconds from now after which nothing is begun and what runs is ended.
    """
    ends_s = time.monotonic() + deadline_s
    went_well = True
    for part in parts:
        left_s = ends_s - time.monotonic()
        problem = _run(part, setting, folder, min(part.limit_s, left_s)) if left_s >= LEAST_S else "no time was left"
        if problem is not None:
            SectionResults(folder, part.section, is_dry=setting.is_dry).error(part.label, problem)
            went_well = False
    return went_well


def _run(part: Part, setting: Setting, folder: Path, limit_s: float) -> str | None:
    """The error, None = none. Standard output is the caller's; both streams are kept in the log."""
    print(f"== {part.label} (at most {limit_s:.0f} s)", flush=True)
    command = [sys.executable, "-u", "-m", "bench.gpu", "--part", part.label, "--out", str(folder)]
    command += ["--backend", setting.backend, *(["--dry-run"] if setting.is_dry else [])]
    log = folder / LOG
    started_s = time.monotonic()
    with log.open("ab") as stream:
        stream.write(f"\n== {part.label}\n".encode())
        stream.flush()
        begins_at = stream.tell()
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env=_environment(), start_new_session=True
        )
        problem = _wait(process, limit_s)
    output = log.read_bytes()[begins_at:].decode(errors="replace")
    print(output[-TAIL_CHARACTERS:], f"({time.monotonic() - started_s:.0f} s)", sep="", flush=True)
    return None if problem is None else f"{problem}\n{output[-TAIL_CHARACTERS:]}"


def _wait(process: "subprocess.Popen[bytes]", limit_s: float) -> str | None:
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"ended after {limit_s:.0f} s, the most it may take"
    finally:
        _end_group(process)
    return None if code == 0 else f"ended with code {code}"


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """It and whatever it started and left behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _environment() -> dict[str, str]:
    """Triton interprets where there is no GPU; nothing is looked for on the network."""
    known = dict(os.environ) | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return known if torch.cuda.is_available() else known | {"TRITON_INTERPRET": "1"}
