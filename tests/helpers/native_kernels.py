"""The compiled kernels for a test, or a skip that says why there are none."""

import platform
from pathlib import Path

import pytest

from tandem.core.errors import ConfigurationError
from tandem.kernels.native.bindings import NativeKernels, load

# What a processor of each level has beside what this one may have: a test then runs the code for lesser ones too.
_FLAGS_OF = {
    "native": set(),
    "x86-64-v3": {"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"},
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
}
ARCHITECTURES = tuple(_FLAGS_OF)


def load_or_skip(architecture: str = "native") -> NativeKernels:
    lacking = _FLAGS_OF[architecture] - _processor_flags()
    if lacking:
        pytest.skip(f"this processor runs no {architecture}: it lacks {', '.join(sorted(lacking))}")
    try:
        return load(architecture=architecture)
    except ConfigurationError as error:
        pytest.skip(str(error))


def _processor_flags() -> set[str]:
    if platform.machine() != "x86_64":
        return set()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next(line for line in lines if line.startswith("flags")).split())
