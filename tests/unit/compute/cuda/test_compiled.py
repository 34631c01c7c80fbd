"""Our Triton kernels compile for GPUs that are not there, with the instructions that they were written for."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.triton_compile import CODES, SUITES

pytest.importorskip("triton", reason="triton is not installed")

SMALLEST_SHARED_MEMORY_BYTES = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # 8.6 and 8.9 have less than 8.0
ONE_BINARY = ("combine_kernel", "gated_combine_kernel", "latent_kernel", "convolve_kernel", "columns_kernel")
QUICK = ("int4@90", "latents@80", "experts@100", "recurrent@90", "rows@90")


def compile_launches(suites: list[str], cache: Path) -> list[dict[str, Any]]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-m", "tests.helpers.triton_compile", *suites]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    launches: list[dict[str, Any]] = json.loads(done.stdout)
    return launches


def check(launches: list[dict[str, Any]]) -> None:
    for launch in launches:
        assert launch["shared_bytes"] <= SMALLEST_SHARED_MEMORY_BYTES[launch["capability"]], launch
        if launch["kernel"] in ONE_BINARY:
            assert launch["num_binaries"] == 1, launch
    products = {(each["kernel"], each["suite"], each["capability"], each["instruction"]) for each in launches}
    by_tokens = [each for each in products if each[0] in ("coded_kernel", "experts_kernel")]
    # NOTE: of one instruction whatever the number of tokens, since two may add in another order.
    assert len({each[:3] for each in by_tokens}) == len(by_tokens), by_tokens
    assert all(each[3] not in (None, "fma.rn.f32") for each in by_tokens), by_tokens


def test_kernels_compile(tmp_path: Path) -> None:
    """The interpreter accepts Python that the compiler does not."""
    launches = compile_launches(list(QUICK), tmp_path)
    assert {launch["kernel"] for launch in launches} == {
        *("coded_kernel", "sums_kernel", "combine_kernel", "gated_combine_kernel"),
        *("experts_kernel", "weighted_sum_kernel", "latent_kernel"),
        *("recur_kernel", "convolve_kernel", "columns_kernel"),
        *("norm_kernel", "gated_kernel", "rope_kernel"),
    }
    binaries = {each["kernel"]: each["num_binaries"] for each in launches if each["suite"] == "rows"}
    # NOTE: with and without a residual, an activation each, and with K and V or without; none for other batches.
    assert binaries == {"norm_kernel": 2, "gated_kernel": 2, "rope_kernel": 2}
    check(launches)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_of_every_format_compile_for_every_gpu(capability: int, tmp_path: Path) -> None:
    launches = compile_launches([f"{name}@{capability}" for name in SUITES], tmp_path)
    assert {launch["suite"] for launch in launches} >= set(CODES)
    check([launch for launch in launches if launch["suite"] != "attention"])
