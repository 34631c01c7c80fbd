"""Attention backend on NVIDIA GPUs with Tandem's own Triton kernels: any shape and dtype that the KV cache can hold.

Chooses tile sizes and launches; the arithmetic is in `triton_paged`. Tiles and the split length depend on the layer's
shape only, never on the batch, so a request's output is the same alone and in a batch. Never synchronises with the
device, so it can be captured in a CUDA graph. Ran on an H200 (decision 116).
"""

import importlib
import importlib.util
from collections.abc import Collection
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from tandem.architecture.state import KVSpec
from tandem.compute.attention import AttentionParams
from tandem.compute.layer_states import LayerKV
from tandem.compute.step import AttentionBatch
from tandem.core.config import BLOCK_SIZES

KERNELS = "tandem.compute.cuda.triton_paged"  # imported when first used, since it needs triton
MAX_HEAD_DIM = 256
MIN_CAPABILITY = (8, 0)  # compute capability of the GPU
MIN_DOT_SIZE = 16  # the least that a Triton matrix product takes in any dimension
KV_TILE_BYTES = 16384  # of K or V in shared memory at once; two stages of both fit the smallest supported GPU
PREFILL_QUERY_TILE_BYTES = 16384  # of queries that one program computes
PREFILL_SEARCH_REQUESTS = 16  # looked at together when a prefill program finds its request; fixed: one binary
SPLITS_PER_LEVEL = 8  # splits of one length, before it doubles
LAUNCH_OPTIONS = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}


def _power_of_two(minimum: int) -> int:
    return 1 << (minimum - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Tiles:
    """Launch sizes of one layer shape. Rows are query heads of one KV head, times tokens in prefill."""

    decode_rows: int
    prefill_rows: int
    kv_tokens: int
    head_dim: int  # padded

    @classmethod
    def of(cls, group: int, head_dim: int, item_bytes: int) -> "Tiles":
        """Launch sizes for `group` query heads per KV head and elements of `item_bytes`."""
        padded_dim = max(MIN_DOT_SIZE, _power_of_two(head_dim))
        row_bytes = padded_dim * item_bytes
        group_rows = max(MIN_DOT_SIZE, _power_of_two(group))
        return cls(
            decode_rows=group_rows,
            prefill_rows=max(group_rows, min(64, PREFILL_QUERY_TILE_BYTES // row_bytes)),
            kv_tokens=max(MIN_DOT_SIZE, min(64, KV_TILE_BYTES // row_bytes)),
            head_dim=padded_dim,
        )


class TritonBackend:
    """Implements `AttentionBackend` for any mix of decodes and prefill chunks.

    Args:
        device: device of the KV cache.
        split_tokens: positions that one program of a decode covers, a multiple of 64; twice as many after every eighth
            split, so that the launch for the longest context stays small. Splits are added in order.
    """

    name = "triton"
    graph_safe = True

    def __init__(self, device: torch.device, split_tokens: int = 512) -> None:
        assert split_tokens % 64 == 0, split_tokens
        self._device = device
        self._split_tokens = split_tokens

    def refuses(self, spec: KVSpec, block_size: int, softcap: float, *, sinks: bool = False) -> str | None:
        """Reason why the kernel cannot serve such a layer; None = it can. Needs triton and a GPU that has bfloat16.
        Soft-capping and windows are always served.
        """
        if sinks:
            return "it has no attention sinks"
        if self._device.type != "cuda":
            return f"device {self._device} is not CUDA"
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed; it comes with PyTorch's CUDA builds"
        capability = torch.cuda.get_device_capability(self._device)
        if capability < MIN_CAPABILITY:
            return f"compute capability {capability} is below {MIN_CAPABILITY}"
        if spec.head_dim > MAX_HEAD_DIM:
            return f"head_dim={spec.head_dim} is above {MAX_HEAD_DIM}"
        if block_size not in BLOCK_SIZES:
            return f"block_size={block_size} is not one of {BLOCK_SIZES}"
        return None

    def prepare(self, batch: AttentionBatch, kv: LayerKV, layers: Collection[AttentionParams]) -> AttentionBatch:
        """The batch itself: nothing is derived from it."""
        return batch

    def attend(
        self, queries: torch.Tensor, kv: LayerKV, batch: AttentionBatch, params: AttentionParams
    ) -> torch.Tensor:
        """Causal attention of `queries` `[num_tokens, num_heads, head_dim]`; returns the same shape and dtype."""
        assert queries.stride(-1) == kv.keys.stride(-1) == kv.values.stride(-1) == batch.block_tables.stride(-1) == 1
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        call = _Call(importlib.import_module(KERNELS), queries, kv, batch, params, out)
        if _may_hold_decodes(batch, queries.shape[0]):
            call.decode(self._split_tokens)
        if batch.max_query_len > 1:
            call.prefill()
        return out


def num_splits_for(max_seq_len: int, split_tokens: int) -> int:
    """Number of splits that cover `max_seq_len` positions; must agree with `split_start` in the kernels."""
    covered = num_splits = 0
    while covered < max_seq_len:
        covered += split_tokens << (num_splits // SPLITS_PER_LEVEL)
        num_splits += 1
    return num_splits


def _may_hold_decodes(batch: AttentionBatch, num_tokens: int) -> bool:
    """Whether some request may be decoding; False only if the shapes show that all requests have the same number of
    tokens, more than one.
    """
    return batch.max_query_len == 1 or num_tokens < batch.num_requests * batch.max_query_len


@dataclass(frozen=True, slots=True)
class _Call:
    """Launches for one layer."""

    kernels: ModuleType
    queries: torch.Tensor  # [num_tokens, num_heads, head_dim]
    kv: LayerKV
    batch: AttentionBatch
    params: AttentionParams
    out: torch.Tensor  # [num_tokens, num_heads, head_dim]

    @property
    def group(self) -> int:
        return self.queries.shape[1] // self.kv.keys.shape[1]

    @property
    def tiles(self) -> Tiles:
        return Tiles.of(self.group, self.queries.shape[2], self.queries.element_size())

    def decode(self, split_tokens: int) -> None:
        """Launches for requests with one query token. NOTE: the grid covers `max_seq_len`; programs past a request's
        end return.
        """
        num_requests, num_heads, head_dim = self.batch.num_requests, *self.queries.shape[1:]
        num_splits = num_splits_for(self.batch.max_seq_len, split_tokens)
        partials = (num_requests, num_heads, num_splits) if num_splits > 1 else (0, 0, 0)
        partial_out = self.queries.new_empty((*partials, head_dim), dtype=torch.float32)
        partial_stats = self.queries.new_empty((*partials, 2), dtype=torch.float32)
        self.kernels.decode_kernel[(num_requests, self.kv.keys.shape[1], num_splits)](
            self.out,
            partial_out,
            partial_stats,
            **self._tensors(),
            **self._strides(),
            **self._constants(self.tiles.decode_rows),
            num_splits=num_splits,
            SPLIT=split_tokens,
        )
        if num_splits > 1:
            self._combine(partial_out, partial_stats, split_tokens)

    def _combine(self, partial_out: torch.Tensor, partial_stats: torch.Tensor, split_tokens: int) -> None:
        num_requests, num_heads, num_splits, head_dim = partial_out.shape
        self.kernels.combine_kernel[(num_requests, num_heads)](
            self.out,
            partial_out,
            partial_stats,
            self.batch.query_start,
            self.batch.seq_lens,
            num_splits=num_splits,
            NUM_HEADS=num_heads,
            WINDOW=self.params.window or 0,
            SPLIT=split_tokens,
            HEAD_DIM=head_dim,
            TILE_D=self.tiles.head_dim,
            **LAUNCH_OPTIONS,
        )

    def prefill(self) -> None:
        """Launch for requests with several query tokens."""
        num_requests, num_tokens = self.batch.num_requests, self.queries.shape[0]
        num_tiles = num_tokens // (self.tiles.prefill_rows // self.group) + num_requests
        self.kernels.prefill_kernel[(num_tiles, self.kv.keys.shape[1])](
            self.out,
            **self._tensors(),
            **self._strides(),
            **self._constants(self.tiles.prefill_rows),
            num_requests=num_requests,
            TILE_REQUESTS=PREFILL_SEARCH_REQUESTS,
        )

    def _tensors(self) -> dict[str, Any]:
        return {
            "queries": self.queries,
            "keys": self.kv.keys,
            "values": self.kv.values,
            "query_start": self.batch.query_start,
            "seq_lens": self.batch.seq_lens,
            "block_tables": self.batch.block_tables,
            "scale": self.params.scale,
        }

    def _strides(self) -> dict[str, int]:
        keys, values = self.kv.keys.stride(), self.kv.values.stride()
        return {
            "table_stride": self.batch.block_tables.stride(0),
            "q_stride_token": self.queries.stride(0),
            "q_stride_head": self.queries.stride(1),
            "k_stride_block": keys[0],
            "k_stride_head": keys[1],
            "k_stride_token": keys[2],
            "v_stride_block": values[0],
            "v_stride_head": values[1],
            "v_stride_token": values[2],
        }

    def _constants(self, rows: int) -> dict[str, Any]:
        # NOTE: float32 products stay float32; the default would round their inputs to TF32.
        precision = "ieee" if self.queries.dtype == torch.float32 else "tf32"
        return {
            "NUM_HEADS": self.queries.shape[1],
            "GROUP": self.group,
            "WINDOW": self.params.window or 0,
            "SOFTCAP": self.params.softcap,
            "BLOCK_SIZE": self.kv.keys.shape[2],
            "HEAD_DIM": self.queries.shape[2],
            "TILE_M": rows,
            "TILE_N": self.tiles.kv_tokens,
            "TILE_D": self.tiles.head_dim,
            "PRECISION": precision,
            **LAUNCH_OPTIONS,
        }
