"""What the Triton backend refuses, and that its kernels compile for real GPUs with the tiles it chooses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tandem.attention.triton_backend import Tiles, TritonBackend, num_splits_for
from tandem.kvcache.spec import KVSpec

SMALLEST_SHARED_MEMORY_BYTES = 99 * 1024  # compute capability 8.6 and 8.9

COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from tandem.attention import triton_paged
from tandem.attention.triton_backend import LAUNCH_OPTIONS, Tiles

POINTERS = {name: "*bf16" for name in ("out", "queries", "keys", "values")}
POINTERS |= {name: "*i32" for name in ("query_start", "seq_lens", "block_tables")}
POINTERS |= {name: "*fp32" for name in ("partial_out", "partial_stats")}
tiles = Tiles.of(4, 128, 2)
CONSTANTS = dict(NUM_HEADS=32, GROUP=4, WINDOW=1024, SOFTCAP=50.0, BLOCK_SIZE=16, HEAD_DIM=128, SPLIT=512,
    TILE_N=tiles.kv_tokens, TILE_D=tiles.head_dim, TILE_REQUESTS=64, PRECISION="tf32")
for name, rows in (("decode", tiles.decode_rows), ("prefill", tiles.prefill_rows), ("combine", 0)):
    kernel = getattr(triton_paged, name + "_kernel")
    constants = {key: value for key, value in (CONSTANTS | {"TILE_M": rows}).items() if key in kernel.arg_names}
    signature = {arg: "i64" if "stride" in arg else "i32" for arg in kernel.arg_names}
    signature |= {"scale": "fp32"} if "scale" in signature else {}
    signature |= {arg: POINTERS[arg] for arg in signature if arg in POINTERS}
    signature |= dict.fromkeys(constants, "constexpr")
    indexed = {(kernel.arg_names.index(key),): value for key, value in constants.items()}
    source = ASTSource(kernel, signature, indexed)
    print(triton.compile(source, target=GPUTarget("cuda", 80, 32), options=LAUNCH_OPTIONS).metadata.shared)
"""


def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """The interpreter accepts Python that the compiler does not. Ahead of time, so that no GPU is needed."""
    pytest.importorskip("triton", reason="triton is not installed")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", COMPILE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    shared_bytes = [int(line) for line in done.stdout.split()]
    assert len(shared_bytes) == 3
    assert max(shared_bytes) <= SMALLEST_SHARED_MEMORY_BYTES


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
