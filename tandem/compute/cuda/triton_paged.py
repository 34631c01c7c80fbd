"""Triton kernels for paged attention: decode with split KV, the reduction of its splits, and prefill.

Every kernel reads exactly the tokens that some query of its tile sees, never freed window blocks or unwritten slots. A
query's arithmetic depends on its own request only (tiles and splits start at fixed positions), never on the rest of the
batch. A value that is not finite reaches only tokens that see it. Checked on CPU in interpreter mode, compiled for
NVIDIA targets and, but for the care for such values, run on an H200 (decision 116).

Parameters are as in `AttentionBatch` and `AttentionParams` (window and softcap 0 = none). GROUP is the number of query
heads per KV head; a tile has M rows (those heads, in prefill of several tokens), N positions and D numbers of a head.
Maths: online softmax as in FlashAttention (Dao et al. 2022, algorithm 1), in base 2; flash-decoding's split reduction.
"""

# Triton's decorators are untyped, and its convention is capitals for compile-time arguments:
# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: N803, N806

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
SPLITS_PER_LEVEL = tl.constexpr(8)
# NOTE: arguments that vary with the batch are not specialised on, so that every batch runs the same binary.
BATCH_ARGUMENTS = ["table_stride", "num_splits", "num_requests"]


@triton.jit
def split_start(split: tl.tensor, SPLIT: tl.constexpr) -> tl.tensor:
    """First position of a split: eight splits are SPLIT tokens long, eight twice that, and so on, so that long contexts
    have few.

    NOTE: constants are on the right of tensors, since the interpreter of Triton 3.7 makes a constant of the product.
    """
    level = split // SPLITS_PER_LEVEL
    scale = 1 << level
    return ((scale - 1) * SPLITS_PER_LEVEL + (split - level * SPLITS_PER_LEVEL) * scale) * SPLIT


@triton.jit
def _scores(q: tl.tensor, k: tl.tensor, scale: tl.tensor, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr) -> tl.tensor:
    """Scaled, optionally soft-capped scores times log2(e): `q` [M, D] and `k` [D, N] -> [M, N] float32."""
    scores = tl.dot(q, k, input_precision=PRECISION) * scale
    if SOFTCAP > 0.0:
        # cap * tanh(scores / cap), by exp: libdevice's tanh does not exist in the interpreter.
        scores = SOFTCAP * (1.0 - 2.0 / (tl.exp(scores * (2.0 / SOFTCAP)) + 1.0))
    return scores * LOG2E


@triton.jit
def _meet_keys(
    acc: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    q: tl.tensor,
    positions: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    start: tl.tensor,  # first position of the tile
    begin: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,
    k_stride_block: tl.tensor,
    k_stride_token: tl.tensor,
    v_stride_block: tl.tensor,
    v_stride_token: tl.tensor,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_CAREFUL: tl.constexpr,
) -> tl.tensor:
    """`acc`, `row_max` and `row_sum` of `_attend_tile` after one more tile of positions.

    IS_CAREFUL: rows may see different positions, so that a value that is not finite is kept from rows that do not see
    it, whose weight for it is 0. Rows that see it become NaN.
    """
    dims = tl.arange(0, TILE_D)
    in_head = dims < HEAD_DIM
    tokens = start + tl.arange(0, TILE_N)
    readable = (tokens >= begin) & (tokens < end)
    blocks = tl.load(table + tokens // BLOCK_SIZE, mask=readable, other=0).to(tl.int64)
    offsets = tokens % BLOCK_SIZE
    k_rows = keys + blocks * k_stride_block + offsets * k_stride_token
    k = tl.load(k_rows[None, :] + dims[:, None], mask=readable[None, :] & in_head[:, None], other=0.0)
    visible = readable[None, :] & (tokens[None, :] <= positions[:, None])
    if WINDOW > 0:
        visible = visible & (tokens[None, :] > positions[:, None] - WINDOW)
    scores = tl.where(visible, _scores(q, k, scale, SOFTCAP, PRECISION), float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # NOTE: a row that has seen nothing yet keeps its -inf; subtracting 0 instead keeps NaN out of it.
    reference = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - reference[:, None])
    decay = tl.exp2(row_max - reference)
    v_rows = values + blocks * v_stride_block + offsets * v_stride_token
    v = tl.load(v_rows[:, None] + dims[None, :], mask=readable[:, None] & in_head[None, :], other=0.0)
    row_sum = row_sum * decay + tl.sum(weights, 1)
    if IS_CAREFUL:
        is_finite = tl.abs(v.to(tl.float32)) < float("inf")
        is_harmful = tl.max(tl.where(is_finite, 0, 1), 1)
        is_harmed = tl.max(tl.where(visible, is_harmful[None, :], 0), 1)
        v = tl.where(is_finite, v, 0.0).to(v.dtype)
        row_sum = tl.where(is_harmed > 0, float("nan"), row_sum)
    acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return acc, new_max, row_sum


@triton.jit
def _attend_tile(
    q: tl.tensor,  # [M, D]
    positions: tl.tensor,  # [M] absolute position of each row's token
    keys: tl.tensor,  # pointer to this KV head of block 0
    values: tl.tensor,
    table: tl.tensor,  # pointer to this request's row of block ids
    begin: tl.tensor,  # first position that any row sees
    whole: tl.tensor,  # positions before it are in tiles that all rows see whole
    end: tl.tensor,  # one past the last
    scale: tl.tensor,
    k_stride_block: tl.tensor,
    k_stride_token: tl.tensor,
    v_stride_block: tl.tensor,
    v_stride_token: tl.tensor,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_CAREFUL: tl.constexpr,  # behind `whole`
) -> tl.tensor:
    """Unnormalised output [M, D], row maxima [M] (base 2) and row sums [M] over positions `begin` to `end`."""
    acc = tl.zeros([TILE_M, TILE_D], dtype=tl.float32)
    row_max = tl.full([TILE_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([TILE_M], dtype=tl.float32)
    for start in range(begin // TILE_N * TILE_N, whole, TILE_N):
        acc, row_max, row_sum = _meet_keys(
            *(acc, row_max, row_sum, q, positions, keys, values, table, start, begin, end, scale),
            *(k_stride_block, k_stride_token, v_stride_block, v_stride_token),
            *(WINDOW, SOFTCAP, BLOCK_SIZE, HEAD_DIM, TILE_N, TILE_D, PRECISION, False),
        )
    if IS_CAREFUL:
        for start in range(whole, end, TILE_N):
            acc, row_max, row_sum = _meet_keys(
                *(acc, row_max, row_sum, q, positions, keys, values, table, start, begin, end, scale),
                *(k_stride_block, k_stride_token, v_stride_block, v_stride_token),
                *(WINDOW, SOFTCAP, BLOCK_SIZE, HEAD_DIM, TILE_N, TILE_D, PRECISION, True),
            )
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=BATCH_ARGUMENTS)
def decode_kernel(
    out: tl.tensor,  # [num_tokens, num_heads, head_dim], contiguous; written when num_splits == 1
    partial_out: tl.tensor,  # [num_requests, num_heads, num_splits, head_dim] float32; written otherwise
    partial_stats: tl.tensor,  # [num_requests, num_heads, num_splits, 2] float32: row maximum, row sum
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    query_start: tl.tensor,
    seq_lens: tl.tensor,
    block_tables: tl.tensor,
    scale: tl.tensor,
    table_stride: tl.tensor,
    num_splits: tl.tensor,
    q_stride_token: tl.tensor,
    q_stride_head: tl.tensor,
    k_stride_block: tl.tensor,
    k_stride_head: tl.tensor,
    k_stride_token: tl.tensor,
    v_stride_block: tl.tensor,
    v_stride_head: tl.tensor,
    v_stride_token: tl.tensor,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One program per (request, KV head, split). For requests with one query token; the group's heads are its rows."""
    request, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.load(query_start + request).to(tl.int64)
    if tl.load(query_start + request + 1) - token != 1:
        return
    seq_len = tl.load(seq_lens + request)
    position = seq_len - 1
    begin = split_start(split, SPLIT)
    if WINDOW > 0:
        begin = tl.maximum(begin, position - WINDOW + 1)
    end = tl.minimum(split_start(split + 1, SPLIT), seq_len)
    if begin >= end:
        return
    rows = tl.arange(0, TILE_M)
    heads = kv_head * GROUP + rows
    dims = tl.arange(0, TILE_D)
    in_tile = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_rows = queries + token * q_stride_token + heads * q_stride_head
    q = tl.load(q_rows[:, None] + dims[None, :], mask=in_tile, other=0.0)
    acc, row_max, row_sum = _attend_tile(
        q,
        tl.zeros([TILE_M], dtype=tl.int32) + position,
        keys + kv_head * k_stride_head,
        values + kv_head * v_stride_head,
        block_tables + request.to(tl.int64) * table_stride,
        begin,
        end,
        end,
        scale,
        k_stride_block,
        k_stride_token,
        v_stride_block,
        v_stride_token,
        WINDOW,
        SOFTCAP,
        BLOCK_SIZE,
        HEAD_DIM,
        TILE_M,
        TILE_N,
        TILE_D,
        PRECISION,
        False,
    )
    if num_splits == 1:
        out_rows = out + (token * NUM_HEADS + heads) * HEAD_DIM
        result = acc / row_sum[:, None]
        tl.store(out_rows[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=in_tile)
    else:
        entries = (request.to(tl.int64) * NUM_HEADS + heads) * num_splits + split
        tl.store(partial_out + (entries * HEAD_DIM)[:, None] + dims[None, :], acc, mask=in_tile)
        tl.store(partial_stats + entries * 2, row_max, mask=rows < GROUP)
        tl.store(partial_stats + entries * 2 + 1, row_sum, mask=rows < GROUP)


@triton.jit(do_not_specialize=BATCH_ARGUMENTS)
def combine_kernel(
    out: tl.tensor,
    partial_out: tl.tensor,
    partial_stats: tl.tensor,
    query_start: tl.tensor,
    seq_lens: tl.tensor,
    num_splits: tl.tensor,
    NUM_HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_D: tl.constexpr,
) -> None:
    """One program per (request, head): adds the splits that hold visible positions, in order of position."""
    request, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_start + request).to(tl.int64)
    if tl.load(query_start + request + 1) - token != 1:
        return
    seq_len = tl.load(seq_lens + request)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(seq_len - WINDOW, 0)
    dims = tl.arange(0, TILE_D)
    in_head = dims < HEAD_DIM
    acc = tl.zeros([TILE_D], dtype=tl.float32)
    running_max = float("-inf")
    running_sum = 0.0
    for split in range(num_splits):
        if (split_start(split, SPLIT) < seq_len) & (split_start(split + 1, SPLIT) > first):
            entry = (request.to(tl.int64) * NUM_HEADS + head) * num_splits + split
            split_max = tl.load(partial_stats + entry * 2)
            split_sum = tl.load(partial_stats + entry * 2 + 1)
            new_max = tl.maximum(running_max, split_max)
            decay = tl.exp2(running_max - new_max)
            weight = tl.exp2(split_max - new_max)
            partial = tl.load(partial_out + entry * HEAD_DIM + dims, mask=in_head, other=0.0)
            acc = acc * decay + partial * weight
            running_sum = running_sum * decay + split_sum * weight
            running_max = new_max
    destination = out + (token * NUM_HEADS + head) * HEAD_DIM + dims
    tl.store(destination, (acc / running_sum).to(out.dtype.element_ty), mask=in_head)


@triton.jit(do_not_specialize=BATCH_ARGUMENTS)
def prefill_kernel(
    out: tl.tensor,  # [num_tokens, num_heads, head_dim], contiguous
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    query_start: tl.tensor,
    seq_lens: tl.tensor,
    block_tables: tl.tensor,
    scale: tl.tensor,
    table_stride: tl.tensor,
    num_requests: tl.tensor,
    q_stride_token: tl.tensor,
    q_stride_head: tl.tensor,
    k_stride_block: tl.tensor,
    k_stride_head: tl.tensor,
    k_stride_token: tl.tensor,
    v_stride_block: tl.tensor,
    v_stride_head: tl.tensor,
    v_stride_token: tl.tensor,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE_REQUESTS: tl.constexpr,
) -> None:
    """One program per (query tile, KV head). For requests with several query tokens. Rows are (token, head of group).

    Request `r` owns the tiles from `query_start[r] // tile_tokens + r`: at least as many as it needs, and no two
    requests share one, so the grid's size follows from shapes alone.
    """
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    TILE_TOKENS: tl.constexpr = TILE_M // GROUP
    num_started = 0  # requests whose tiles begin at or before this one
    for base in range(0, num_requests, TILE_REQUESTS):
        candidates = base + tl.arange(0, TILE_REQUESTS)
        in_batch = candidates < num_requests
        starts = tl.load(query_start + candidates, mask=in_batch, other=0)
        num_started += tl.sum((in_batch & (starts // TILE_TOKENS + candidates <= tile)).to(tl.int32), 0)
    request = tl.cast(num_started, tl.int32) - 1
    query_begin = tl.load(query_start + request)
    query_len = tl.load(query_start + request + 1) - query_begin
    first = (tile - query_begin // TILE_TOKENS - request) * TILE_TOKENS
    if (query_len == 1) | (first >= query_len):
        return
    rows = tl.arange(0, TILE_M)
    tokens = first + rows // GROUP
    in_rows = (rows < TILE_TOKENS * GROUP) & (tokens < query_len)
    heads = kv_head * GROUP + rows % GROUP
    num_cached = tl.load(seq_lens + request) - query_len
    begin = 0
    whole = (num_cached + first + 1) // TILE_N * TILE_N
    if WINDOW > 0:
        begin = tl.maximum(num_cached + first - WINDOW + 1, 0)
        whole = begin // TILE_N * TILE_N
    end = num_cached + tl.minimum(first + TILE_TOKENS, query_len)
    dims = tl.arange(0, TILE_D)
    in_tile = in_rows[:, None] & (dims < HEAD_DIM)[None, :]
    out_tokens = (query_begin + tokens).to(tl.int64)
    q_rows = queries + out_tokens * q_stride_token + heads * q_stride_head
    q = tl.load(q_rows[:, None] + dims[None, :], mask=in_tile, other=0.0)
    acc, _, row_sum = _attend_tile(
        q,
        num_cached + tokens,
        keys + kv_head * k_stride_head,
        values + kv_head * v_stride_head,
        block_tables + request.to(tl.int64) * table_stride,
        begin,
        whole,
        end,
        scale,
        k_stride_block,
        k_stride_token,
        v_stride_block,
        v_stride_token,
        WINDOW,
        SOFTCAP,
        BLOCK_SIZE,
        HEAD_DIM,
        TILE_M,
        TILE_N,
        TILE_D,
        PRECISION,
        True,
    )
    out_rows = out + (out_tokens * NUM_HEADS + heads) * HEAD_DIM
    # NOTE: rows past the chunk may lie outside every window and sum to 0; they are not stored.
    result = acc / tl.where(in_rows, row_sum, 1.0)[:, None]
    tl.store(out_rows[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=in_tile)
