"""The compiled kernels for a test, or a skip where there is no compiler; that they do not compile is a failure."""

import os
import platform
import shutil
from pathlib import Path

import pytest

from tandem.compute.native.bindings import NativeKernels, load
from tandem.compute.native.sampling import NativeDraws, load_draws

# What a processor of each level has beside what this one may have: a test then runs the code for lesser ones too.
_FLAGS_OF = {
    "native": set(),
    "x86-64-v2": {"sse4_2", "popcnt"},
    "x86-64-v3": {"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"},
    "alderlake": {"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "avx_vnni", "gfni", "vaes", "vpclmulqdq"},
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
}
ARCHITECTURES = (
    *("native", "x86-64-v3"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("alderlake", "x86-64-v4")),
)
"""NOTE: kernels for each take most of a minute to compile. What v4 chooses, the machine itself or v3 does too. Alder
Lake's are those of AVX2 with AVX-VNNI.
"""
FLAG_OF_MACRO = {
    "__AVX2__": "avx2",
    "__F16C__": "f16c",
    "__AVXVNNI__": "avx_vnni",
    "__AVX512F__": "avx512f",
    "__AVX512BW__": "avx512bw",
    "__AVX512VL__": "avx512vl",
    "__AVX512VNNI__": "avx512_vnni",
    "__AVX512BF16__": "avx512_bf16",
}
"""Macros by which the sources choose code for an x86-64, and the processor's flag that defines each."""


def load_or_skip(architecture: str = "native") -> NativeKernels:
    _skip_unless_it_runs(architecture)
    return load(architecture=architecture)


def load_draws_or_skip(architecture: str = "native") -> NativeDraws:
    _skip_unless_it_runs(architecture)
    return load_draws(architecture=architecture)


def _skip_unless_it_runs(architecture: str) -> None:
    lacking = _FLAGS_OF[architecture] - processor_flags()
    if lacking:
        pytest.skip(f"this processor runs no {architecture}: it lacks {', '.join(sorted(lacking))}")
    choosing = set(FLAG_OF_MACRO.values())
    if architecture != "native" and _FLAGS_OF[architecture] & choosing == processor_flags() & choosing:
        pytest.skip(f"this processor's own code is that of {architecture}: it has nothing beyond it that is used")
    if shutil.which(os.environ.get("CXX") or "g++") is None:
        pytest.skip("the CPU kernels are compiled by a C++ compiler, and none is on PATH")


def processor_flags() -> set[str]:
    """As Linux names them; of an x86-64 alone."""
    if platform.machine() != "x86_64":
        return set()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next(line for line in lines if line.startswith("flags")).split())
