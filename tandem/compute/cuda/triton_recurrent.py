"""Triton kernels for recurrent layers: the short convolution, and the recurrence token by token.

A program keeps some rows of a head's matrix in registers through all tokens of its request. So no bit depends on how a
prompt is divided or what shares a step. Checked on CPU in interpreter mode, compiled for NVIDIA targets, and run on an
H200 (decision 116).

Maths: Mamba-2 (Dao and Gu 2024, arXiv:2405.21060), and the gated delta rule (Yang et al. 2024, arXiv:2412.06464).
"""

# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: N803

import triton
import triton.language as tl

MOST_DECAY = tl.constexpr(1e4)  # NOTE: an infinite one would make 0 * inf of what it multiplies


@triton.jit
def _softplus(x: tl.tensor) -> tl.tensor:
    """`log(1 + exp(x))`. NOTE: the quotient undoes the rounding of `1 + exp(x)`; libdevice's log1p does not exist in
    the interpreter.
    """
    grown = tl.exp(tl.minimum(x, 20.0))
    total = 1.0 + grown
    rest = total - 1.0
    small = tl.where(rest == 0.0, grown, tl.log(total) * (grown / tl.where(rest == 0.0, 1.0, rest)))
    return tl.where(x > 20.0, x, small)


@triton.jit(do_not_specialize=["first_head"])
def recur_kernel(
    out: tl.tensor,  # [num_tokens, num_heads, rows] float32
    q: tl.tensor,  # [num_tokens, num_groups, columns]
    k: tl.tensor,
    v: tl.tensor,  # [num_tokens, num_heads, rows]
    a: tl.tensor,  # [num_tokens, num_heads] or [num_tokens, num_heads, columns]
    b: tl.tensor,  # [num_tokens, num_heads], read if IS_DELTA
    a_log: tl.tensor,
    a_bias: tl.tensor,
    matrices: tl.tensor,  # [num_pool_pages, HEADS_PER_PAGE, rows, columns] float32
    read_pages: tl.tensor,  # [num_requests, NUM_PAGES]
    is_first: tl.tensor,  # int8
    query_start: tl.tensor,
    first_write: tl.tensor,
    write_pages: tl.tensor,  # [num_writes, NUM_PAGES]
    write_ends: tl.tensor,
    page_stride: tl.tensor,
    first_head: tl.tensor,  # among the matrices of all layers in a block
    NUM_PAGES: tl.constexpr,
    HEADS_PER_PAGE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    BY_RATE: tl.constexpr,
    IS_DELTA: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
) -> None:
    """One program per (request, head, tile of rows). All inputs are contiguous, as in `RecurrenceInputs`,
    `RecurrenceParams` and `RecurrentBatch`.

    Args:
        BY_COLUMN, BY_RATE: whether `a`, and `a_log`, have a number for each column of a head's matrix, not one a head.
        IS_DELTA: whether the delta rule is computed (`b` is read), else Mamba-2.
        NUM_PAGES, HEADS_PER_PAGE: pages of a block, and matrices in a page.
    """
    request, head = tl.program_id(0), tl.program_id(1)
    group = head // (NUM_HEADS // NUM_GROUPS)
    rows, columns = tl.program_id(2) * TILE_ROWS + tl.arange(0, TILE_ROWS), tl.arange(0, TILE_COLUMNS)
    in_rows, in_columns = rows < ROWS, columns < COLUMNS
    in_tile = in_rows[:, None] & in_columns[None, :]
    page, place = (first_head + head) // HEADS_PER_PAGE, (first_head + head) % HEADS_PER_PAGE
    at = (place * ROWS + rows[:, None]) * COLUMNS + columns[None, :]
    begins = tl.load(is_first + request) != 0
    before = matrices + tl.load(read_pages + request * NUM_PAGES + page) * page_stride
    state = tl.load(before + at, mask=in_tile & (begins == 0), other=0.0)
    if BY_RATE:
        rate = -tl.exp(tl.load(a_log + head * COLUMNS + columns, mask=in_columns, other=0.0))[None, :]
    else:
        rate = -tl.exp(tl.load(a_log + head))
    if BY_COLUMN:
        bias = tl.load(a_bias + head * COLUMNS + columns, mask=in_columns, other=0.0)
    else:
        bias = tl.load(a_bias + head)
    first = tl.load(first_write + request)
    for write in range(first, tl.load(first_write + request + 1)):
        # NOTE: not `start = stop` at the end: compiled, each page would begin at the request's first token
        start = tl.load(query_start + request).to(tl.int64)
        if write > first:
            start = tl.load(write_ends + write - 1)
        for token in range(start, tl.load(write_ends + write)):
            at_head = tl.cast(token, tl.int64) * NUM_HEADS + head
            at_group = (tl.cast(token, tl.int64) * NUM_GROUPS + group) * COLUMNS + columns
            key = tl.load(k + at_group, mask=in_columns, other=0.0).to(tl.float32)
            query = tl.load(q + at_group, mask=in_columns, other=0.0).to(tl.float32)
            added = tl.load(v + at_head * ROWS + rows, mask=in_rows, other=0.0).to(tl.float32)
            if BY_COLUMN:
                raw = tl.load(a + at_head * COLUMNS + columns, mask=in_columns, other=0.0).to(tl.float32)
                step = _softplus(raw + bias)
                state = state * tl.exp(tl.maximum(rate * step, -MOST_DECAY))[None, :]
            else:
                step = _softplus(tl.load(a + at_head).to(tl.float32) + bias)
                state = state * tl.exp(tl.maximum(rate * step, -MOST_DECAY))
            if IS_DELTA:
                beta = 1.0 / (1.0 + tl.exp(-tl.load(b + at_head).to(tl.float32)))
                added = (added - tl.sum(state * key[None, :], 1)) * beta
            else:
                added = added * step
            state = state + added[:, None] * key[None, :]
            tl.store(out + at_head * ROWS + rows, tl.sum(state * query[None, :], 1), mask=in_rows)
        after = matrices + tl.load(write_pages + write * NUM_PAGES + page) * page_stride
        tl.store(after + at, state, mask=in_tile)


@triton.jit
def _row(
    row: tl.tensor,  # number of a row of `RecurrentBatch.with_columns`
    channels: tl.tensor,
    x: tl.tensor,
    columns: tl.tensor,
    read_pages: tl.tensor,
    is_first: tl.tensor,
    num_requests: tl.tensor,
    x_stride: tl.tensor,
    page_stride: tl.tensor,
    in_channels: tl.tensor,
    NUM_CHANNELS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
) -> tl.tensor:
    """[TILE] channels of a row of the step, or of a request's earlier inputs: zeros before its first token."""
    num_before = num_requests * NUM_COLUMNS
    is_before = row < num_before
    request = tl.where(is_before, row // NUM_COLUMNS, 0)
    column = row - request * NUM_COLUMNS
    kept = is_before & (tl.load(is_first + request) == 0)
    at_page = tl.load(read_pages + request) * page_stride + column * NUM_CHANNELS
    old = tl.load(columns + at_page + channels, mask=in_channels & kept, other=0.0)
    token = tl.where(is_before, 0, row - num_before)
    new = tl.load(x + token * x_stride + channels, mask=in_channels & (is_before == 0), other=0.0)
    return tl.where(is_before, old, new)


@triton.jit(do_not_specialize=["num_requests"])
def convolve_kernel(
    out: tl.tensor,  # [num_tokens, channels] float32
    x: tl.tensor,
    columns: tl.tensor,  # [num_blocks, taps - 1, channels]
    weight: tl.tensor,  # [taps, channels] float32
    bias: tl.tensor,
    tap_rows: tl.tensor,  # [num_tokens, taps] int64
    read_pages: tl.tensor,
    is_first: tl.tensor,
    num_requests: tl.tensor,
    x_stride: tl.tensor,
    page_stride: tl.tensor,
    NUM_CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One program per (token, TILE channels): taps in order, as `RecurrentBatch.convolve` adds them."""
    token = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * TILE + tl.arange(0, TILE)
    in_channels = channels < NUM_CHANNELS
    total = tl.zeros([TILE], dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        row = tl.load(tap_rows + token * TAPS + tap)
        numbers = _row(
            row, channels, x, columns, read_pages, is_first, num_requests, x_stride, page_stride, in_channels,
            NUM_CHANNELS, TAPS - 1,
        )  # fmt: skip
        total += numbers.to(tl.float32) * tl.load(weight + tap * NUM_CHANNELS + channels, mask=in_channels, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + channels, mask=in_channels, other=0.0)
    tl.store(out + token * NUM_CHANNELS + channels, total, mask=in_channels)


@triton.jit(do_not_specialize=["num_requests"])
def columns_kernel(
    out: tl.tensor,  # [num_writes * (taps - 1), channels]
    x: tl.tensor,
    columns: tl.tensor,
    column_rows: tl.tensor,  # [num_writes * (taps - 1)] int64
    read_pages: tl.tensor,
    is_first: tl.tensor,
    num_requests: tl.tensor,
    x_stride: tl.tensor,
    page_stride: tl.tensor,
    NUM_CHANNELS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One program per (row, TILE channels): convolution inputs after the step, in separate memory, since pages may
    still be read.
    """
    place = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * TILE + tl.arange(0, TILE)
    in_channels = channels < NUM_CHANNELS
    numbers = _row(
        tl.load(column_rows + place), channels, x, columns, read_pages, is_first, num_requests, x_stride, page_stride,
        in_channels, NUM_CHANNELS, NUM_COLUMNS,
    )  # fmt: skip
    tl.store(out + place * NUM_CHANNELS + channels, numbers, mask=in_channels)
