"""Triton kernel for latent attention (DeepSeek-V2, arXiv:2405.04434, absorbed): every row is the key of all heads, and
its latent is the value, so a tile of rows is read once for both.

A row has RANK numbers of the latent and ROTARY of the rotated key; the other parameters are as in `triton_paged`. A
query's arithmetic depends on its own request only: splits start at fixed positions. Their sums are added by
`triton_paged.combine_kernel`. Checked on CPU in interpreter mode, compiled for NVIDIA targets, and run on an H200
(decision 116).
"""

# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: N803

import triton
import triton.language as tl

from tandem.compute.cuda.triton_paged import LOG2E, split_start

# NOTE: arguments that vary with the batch are not specialised on, so that every batch runs the same binary.
BATCH_ARGUMENTS = ["table_stride", "num_splits"]


@triton.jit(do_not_specialize=BATCH_ARGUMENTS)
def latent_kernel(
    out: tl.tensor,  # [num_tokens, num_heads, rank], contiguous; written when num_splits == 1
    partial_out: tl.tensor,  # [num_tokens, num_heads, num_splits, rank] float32; written otherwise
    partial_stats: tl.tensor,  # [num_tokens, num_heads, num_splits, 2] float32: row maximum, row sum
    queries: tl.tensor,  # [num_tokens, num_heads, rank + rotary_dim]
    rows: tl.tensor,  # [num_blocks, block_size, rank + rotary_dim]
    requests: tl.tensor,  # [num_tokens] int32: the request of each query
    lengths: tl.tensor,  # [num_tokens] int32: tokens that each query sees
    block_tables: tl.tensor,
    scale: tl.tensor,
    table_stride: tl.tensor,
    num_splits: tl.tensor,
    q_stride_token: tl.tensor,
    q_stride_head: tl.tensor,
    stride_block: tl.tensor,
    stride_token: tl.tensor,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_RANK: tl.constexpr,
    TILE_ROTARY: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One program per (query token, tile of heads, split)."""
    token, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    begin = split_start(split, SPLIT)
    end = tl.minimum(split_start(split + 1, SPLIT), tl.load(lengths + token))
    if begin >= end:
        return
    heads = tl.program_id(1) * TILE_M + tl.arange(0, TILE_M)
    in_heads = heads < NUM_HEADS
    ranks, turned = tl.arange(0, TILE_RANK), tl.arange(0, TILE_ROTARY)
    in_rank, in_rotary = ranks < RANK, turned < ROTARY
    q_rows = queries + token * q_stride_token + heads * q_stride_head
    q = tl.load(q_rows[:, None] + ranks[None, :], mask=in_heads[:, None] & in_rank[None, :], other=0.0)
    q_turned = tl.load(q_rows[:, None] + RANK + turned[None, :], mask=in_heads[:, None] & in_rotary[None, :], other=0.0)
    table = block_tables + tl.load(requests + token).to(tl.int64) * table_stride
    acc = tl.zeros([TILE_M, TILE_RANK], dtype=tl.float32)
    row_max = tl.full([TILE_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([TILE_M], dtype=tl.float32)
    for start in range(begin, end, TILE_N):
        tokens = start + tl.arange(0, TILE_N)
        readable = tokens < end
        blocks = tl.load(table + tokens // BLOCK_SIZE, mask=readable, other=0).to(tl.int64)
        at = rows + blocks * stride_block + tokens % BLOCK_SIZE * stride_token
        latents = tl.load(at[:, None] + ranks[None, :], mask=readable[:, None] & in_rank[None, :], other=0.0)
        keys = tl.load(at[None, :] + RANK + turned[:, None], mask=readable[None, :] & in_rotary[:, None], other=0.0)
        scores = tl.dot(q_turned, keys, input_precision=PRECISION)
        scores = tl.dot(q, tl.trans(latents), scores, input_precision=PRECISION) * scale * LOG2E
        scores = tl.where(readable[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        decay = tl.exp2(row_max - new_max)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None] + tl.dot(weights.to(latents.dtype), latents, input_precision=PRECISION)
        row_max = new_max
    in_tile = in_heads[:, None] & in_rank[None, :]
    if num_splits == 1:
        result = acc / row_sum[:, None]
        at_out = out + (token * NUM_HEADS + heads) * RANK
        tl.store(at_out[:, None] + ranks[None, :], result.to(out.dtype.element_ty), mask=in_tile)
    else:
        entries = (token * NUM_HEADS + heads) * num_splits + split
        tl.store(partial_out + (entries * RANK)[:, None] + ranks[None, :], acc, mask=in_tile)
        tl.store(partial_stats + entries * 2, row_max, mask=in_heads)
        tl.store(partial_stats + entries * 2 + 1, row_sum, mask=in_heads)
