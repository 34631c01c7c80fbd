"""Latent attention on NVIDIA GPUs with Tandem's own Triton kernel, for decodes and prefill chunks alike.

Tiles and splits depend on the layer's shape only, never on the batch, so a query's output is the same alone and in a
batch. Never synchronises with the device. Ran on an H200 (decision 116).
"""

import importlib
from collections.abc import Collection

import torch

from tandem.architecture.state import LatentSpec
from tandem.compute.attention import AttentionParams
from tandem.compute.cuda.kernels import TritonKernels
from tandem.compute.cuda.triton_backend import KERNELS as PAGED_KERNELS
from tandem.compute.cuda.triton_backend import LAUNCH_OPTIONS, MIN_DOT_SIZE, num_splits_for
from tandem.compute.layer_states import LayerLatents
from tandem.compute.step import AttentionBatch
from tandem.core.config import BLOCK_SIZES

KERNELS = "tandem.compute.cuda.triton_latents"  # imported when first used, since it needs triton
MAX_RANK = 512  # numbers of a latent
ROW_TILE_BYTES = 32768  # of latents in shared memory at once
MAX_TILE_HEADS = 32  # heads that one program computes
_LATENT_OPTIONS = LAUNCH_OPTIONS | {"num_warps": 8, "num_stages": 2}


class TritonLatentBackend:
    """Implements `LatentBackend`: one program for a query token, some of its heads and a split of its context.

    Args:
        device: device of the KV cache.
        split_tokens: positions that one program covers, a multiple of 64; later splits are longer, see `TritonBackend`.
    """

    name = "triton"
    graph_safe = True

    def __init__(self, device: torch.device, split_tokens: int = 512) -> None:
        assert split_tokens % 64 == 0, split_tokens
        self._device = device
        self._split_tokens = split_tokens

    def refuses(self, spec: LatentSpec, block_size: int, softcap: float, *, sinks: bool = False) -> str | None:
        """Reason why the kernel cannot serve such a layer; None = it can. Needs triton and a GPU that has bfloat16."""
        if (reason := TritonKernels.missing(self._device)) is not None:
            return reason
        if spec.rank > MAX_RANK:
            return f"{spec}: its rank is above {MAX_RANK}"
        if softcap or sinks:
            return f"it has no {'attention sinks' if sinks else 'soft-capping'} over latents"
        if block_size not in BLOCK_SIZES:
            return f"block_size={block_size} is not one of {BLOCK_SIZES}"
        return None

    def prepare(self, batch: AttentionBatch, kv: LayerLatents, layers: Collection[AttentionParams]) -> AttentionBatch:
        """The batch itself: nothing is derived from it."""
        return batch

    def attend(
        self, queries: torch.Tensor, latents: LayerLatents, batch: AttentionBatch, params: AttentionParams
    ) -> torch.Tensor:
        """See `LatentBackend.attend`."""
        assert queries.stride(-1) == latents.rows.stride(-1) == batch.block_tables.stride(-1) == 1
        num_tokens, num_heads, size = queries.shape
        rank = latents.rank
        out = torch.empty(num_tokens, num_heads, rank, dtype=queries.dtype, device=queries.device)
        requests, lengths = _by_token(batch, num_tokens)
        num_splits = num_splits_for(batch.max_seq_len, self._split_tokens)
        partials = (num_tokens, num_heads, num_splits) if num_splits > 1 else (0, 0, 0)
        partial_out = out.new_empty((*partials, rank), dtype=torch.float32)
        partial_stats = out.new_empty((*partials, 2), dtype=torch.float32)
        tile_heads = max(MIN_DOT_SIZE, min(MAX_TILE_HEADS, _power_of_two(num_heads)))
        tile_rank = max(MIN_DOT_SIZE, _power_of_two(rank))
        importlib.import_module(KERNELS).latent_kernel[(num_tokens, -(-num_heads // tile_heads), num_splits)](
            out,
            partial_out,
            partial_stats,
            queries,
            latents.rows,
            requests,
            lengths,
            batch.block_tables,
            params.scale,
            batch.block_tables.stride(0),
            num_splits,
            queries.stride(0),
            queries.stride(1),
            latents.rows.stride(0),
            latents.rows.stride(1),
            NUM_HEADS=num_heads,
            RANK=rank,
            ROTARY=size - rank,
            SPLIT=self._split_tokens,
            BLOCK_SIZE=latents.rows.shape[1],
            TILE_M=tile_heads,
            TILE_N=max(MIN_DOT_SIZE, min(64, ROW_TILE_BYTES // (tile_rank * queries.element_size()))),
            TILE_RANK=tile_rank,
            TILE_ROTARY=max(MIN_DOT_SIZE, _power_of_two(size - rank)),
            PRECISION="ieee" if queries.dtype == torch.float32 else "tf32",
            **_LATENT_OPTIONS,
        )
        if num_splits > 1:
            starts = torch.arange(num_tokens + 1, dtype=torch.int32, device=out.device)
            importlib.import_module(PAGED_KERNELS).combine_kernel[(num_tokens, num_heads)](
                out, partial_out, partial_stats, starts, lengths, num_splits=num_splits, NUM_HEADS=num_heads, WINDOW=0,
                SPLIT=self._split_tokens, HEAD_DIM=rank, TILE_D=tile_rank, **LAUNCH_OPTIONS,
            )  # fmt: skip
        return out


def _by_token(batch: AttentionBatch, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The request of each query token, and the number of tokens that it sees, int32 [num_tokens], without waiting."""
    if batch.max_query_len == 1 and num_tokens == batch.num_requests:
        return torch.arange(num_tokens, dtype=torch.int32, device=batch.seq_lens.device), batch.seq_lens
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=batch.seq_lens.device)
    ends = batch.query_start[1:]
    requests = torch.searchsorted(ends, tokens, right=True, out_int32=True).clamp_max(batch.num_requests - 1)
    owner = requests.long()
    return requests, batch.seq_lens[owner] - (ends[owner] - tokens) + 1


def _power_of_two(minimum: int) -> int:
    return 1 << (minimum - 1).bit_length()
