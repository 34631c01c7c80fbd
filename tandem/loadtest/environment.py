"""The client's machine, which every result records, and its event loop."""

import asyncio
import datetime
import os
import platform
from pathlib import Path
from typing import Any

import psutil

from tandem import __version__


def describe_environment() -> dict[str, Any]:
    """Hardware and software of the client's machine; the server may run on another."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "tandem": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_model(),
        "num_cpus": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
    }


def cpu_model() -> str:
    """The processor's name, or else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def loop_factory() -> "type[asyncio.AbstractEventLoop] | None":
    """uvloop's event loop if it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop
