"""Prints the Debian packages that this Python's Triton compiles with when it runs; nothing where there is no Triton.

It builds a launcher in C for the GPU's driver. Only torch for GPUs brings Triton, so images for CPUs stay without.
"""

import importlib.util
import sys
import sysconfig
from pathlib import Path


def packages() -> list[str]:
    if importlib.util.find_spec("triton") is None:
        return []
    has_headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    return ["gcc", "libc6-dev", *([] if has_headers else ["python3-dev"])]


if __name__ == "__main__":
    sys.stdout.write(" ".join(packages()))
