"""Refusals of the Triton backend; its kernels compile for real GPUs with the tiles it chooses."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from tandem.architecture.state import KVSpec
from tandem.compute.cuda.triton_backend import Tiles, TritonBackend, num_splits_for

SMALLEST_SHARED_MEMORY_BYTES = 99 * 1024  # compute capability 8.6 and 8.9


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Compiled launches of a few unlike batches; compilation is ahead of time, so that no GPU is needed."""
    pytest.importorskip("triton", reason="triton is not installed")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, "-m", "tests.helpers.triton_compile"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    launches: list[dict[str, Any]] = json.loads(done.stdout)
    return launches


def test_kernels_compile_for_a_gpu(compiled: list[dict[str, Any]]) -> None:
    """The interpreter accepts Python that the compiler does not."""
    assert {launch["kernel"] for launch in compiled} == {"decode_kernel", "combine_kernel", "prefill_kernel"}
    assert max(launch["shared_bytes"] for launch in compiled) <= SMALLEST_SHARED_MEMORY_BYTES


def test_one_binary_serves_every_batch(compiled: list[dict[str, Any]]) -> None:
    """A second one might round differently, and would stall the step that first needs it."""
    assert {launch["num_binaries"] for launch in compiled} == {1}


@pytest.mark.parametrize("group", [1, 3, 7, 16, 20])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("item_bytes", [2, 4])
def test_tiles_hold_their_rows(group: int, head_dim: int, item_bytes: int) -> None:
    tiles = Tiles.of(group, head_dim, item_bytes)
    assert group <= tiles.decode_rows <= tiles.prefill_rows
    assert head_dim <= tiles.head_dim < 2 * max(head_dim, 16)
    assert 2 * tiles.kv_tokens * tiles.head_dim * item_bytes <= SMALLEST_SHARED_MEMORY_BYTES
    assert all(size >= 16 and size & (size - 1) == 0 for size in (tiles.decode_rows, tiles.kv_tokens, tiles.head_dim))


@pytest.mark.parametrize(
    ("max_seq_len", "num_splits"),
    [(1, 1), (512, 1), (513, 2), (4096, 8), (4097, 9), (5120, 9), (5121, 10), (131072, 41)],
)
def test_num_splits(max_seq_len: int, num_splits: int) -> None:
    """Eight of 512 positions, eight of 1,024, and so on."""
    assert num_splits_for(max_seq_len, 512) == num_splits


def test_refuses_a_device_that_is_not_cuda() -> None:
    reason = TritonBackend(torch.device("cpu")).refuses(KVSpec(2, 64, "bfloat16"), 16, 0.0)
    assert reason is not None
    assert "cpu" in reason
