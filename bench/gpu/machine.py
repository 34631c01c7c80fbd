"""Facts of a machine: GPU, versions, and missing optional packages.

Machines with a GPU may be beyond any package index, so what is missing is reported and done without.
"""

import datetime
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from types import ModuleType
from typing import Any

import torch

from bench.report import circumstances

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "flash-attn",
    "flash-attn-3",
    "flashinfer-python",
    "nixl-cu13",
    "nixl-cu12",
    "llguidance",
)
_QUERY = "name,driver_version,memory.total,memory.used,clocks.sm,clocks.mem,power.limit,temperature.gpu"
_GRAMMAR_NAMES = ("LLExecutor", "LLMatcher", "LLParserLimits", "LLTokenizer", "TokenizerWrapper")


def stand_in_for_missing() -> None:
    """Let the engine be imported without llguidance, which only answers with a grammar need. None is asked for here."""
    if importlib.util.find_spec("llguidance") is None:
        module = ModuleType("llguidance")
        for name in _GRAMMAR_NAMES:
            setattr(module, name, type(name, (), {}))
        sys.modules["llguidance"] = module


def describe() -> dict[str, Any]:
    """Circumstances of this run, versions (None = missing), and what nvidia-smi says."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    return _circumstances() | {
        "cuda": torch.version.cuda,
        "compute_capability": capability,
        "packages": {name: _version(name) for name in PACKAGES},
        "nvidia_smi": _nvidia_smi(),
    }


def _circumstances() -> dict[str, Any]:
    """NOTE: where there is no git, the commit is unknown; see `--git-sha`."""
    if shutil.which("git") is not None:
        return circumstances()
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {"date": now, "git_sha": "unknown", "gpu": gpu, "num_cpus": os.cpu_count()} | versions


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _nvidia_smi() -> str | None:
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
