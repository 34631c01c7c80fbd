"""Triton kernels for routed experts: pairs of token and expert are sorted by expert, and a program multiplies a tile of
one expert's pairs.

The tensors of each expert stay where they were loaded; `addresses` has a pointer to each, `factors` the factor of each
matrix. Experts that are not chosen are not read. A *place* is the index of a pair in sorted order. Parameters without a
comment are as in `triton_coded.sum_of_split`. Checked on CPU in interpreter mode, compiled for NVIDIA targets, and run
on an H200 (decision 116).
"""

# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: N803, N806

import triton
import triton.language as tl

from tandem.compute.cuda.triton_coded import activated, sum_of_split

PARTS = tl.constexpr(6)  # addresses of a matrix: codes, scales, super scales, offsets, super offsets, bias
MATRICES = tl.constexpr(3)  # of an expert: gate, up, down


@triton.jit
def _address(addresses: tl.tensor, expert: tl.tensor, MATRIX: tl.constexpr, PART: tl.constexpr,
             like: tl.tensor) -> tl.tensor:  # fmt: skip
    """Pointer to a tensor of the expert, of the type of `like`."""
    at = (expert * MATRICES + MATRIX) * PARTS + PART
    return tl.multiple_of(tl.load(addresses + at).to(like.dtype), 16)


@triton.jit
def _sums(
    matrix_outputs: tl.tensor,  # [TILE_N]
    num_outputs: tl.tensor,
    expert: tl.tensor,
    addresses: tl.tensor,
    factors: tl.tensor,
    x: tl.tensor,
    x_rows: tl.tensor,
    in_pairs: tl.tensor,
    sums: tl.tensor,
    sum_rows: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    super_scales: tl.tensor,
    offsets: tl.tensor,
    super_offsets: tl.tensor,
    bias: tl.tensor,
    table: tl.tensor,
    inputs: tl.tensor,
    width: tl.tensor,
    MATRIX: tl.constexpr,
    GROUP: tl.constexpr,
    SUPER: tl.constexpr,
    SPAN: tl.constexpr,
    SPLIT: tl.constexpr,
    FORM: tl.constexpr,
    ADDED: tl.constexpr,
    SCALE_FORM: tl.constexpr,
    OFFSET_FORM: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_T: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """[TILE_N, TILE_T] float32: outputs of one matrix of the expert. The tensor arguments are the first expert's and
    only give types.
    """
    in_outputs = matrix_outputs < num_outputs
    total = tl.zeros([TILE_N, TILE_T], dtype=tl.float32)
    factor = tl.load(factors + expert * MATRICES + MATRIX)
    for split in range(tl.cdiv(inputs, SPLIT)):
        total += sum_of_split(
            split,
            x,
            x_rows,
            in_pairs,
            sums,
            sum_rows,
            matrix_outputs,
            in_outputs,
            _address(addresses, expert, MATRIX, 0, codes),
            _address(addresses, expert, MATRIX, 1, scales),
            _address(addresses, expert, MATRIX, 2, super_scales),
            _address(addresses, expert, MATRIX, 3, offsets),
            _address(addresses, expert, MATRIX, 4, super_offsets),
            table,
            factor,
            inputs,
            width,
            GROUP,
            SUPER,
            SPAN,
            SPLIT,
            FORM,
            ADDED,
            SCALE_FORM,
            OFFSET_FORM,
            HAS_OFFSETS,
            TILE_N,
            TILE_T,
            PRECISION,
        )
    if HAS_BIAS:
        added = tl.load(addresses + (expert * MATRICES + MATRIX) * PARTS + 5).to(bias.dtype)
        total += tl.load(added + matrix_outputs, mask=in_outputs, other=0.0).to(tl.float32)[:, None]
    return total


@triton.jit
def experts_kernel(
    out: tl.tensor,  # [num_pairs, num_outputs]: activated in the rows' dtype if IS_GATED, else float32
    x: tl.tensor,  # rows of tokens if IS_GATED, else of pairs
    sums: tl.tensor,  # [rows, spans] float32, read where there are offsets
    order: tl.tensor,  # [num_pairs] int64: number of the pair at each place, tokens * top_k + its choice
    starts: tl.tensor,  # [num_experts + 1] int64: place of each expert's first pair
    addresses: tl.tensor,  # [num_experts, MATRICES, PARTS] int64
    factors: tl.tensor,  # [num_experts, MATRICES] float32
    codes: tl.tensor,
    scales: tl.tensor,
    super_scales: tl.tensor,
    offsets: tl.tensor,
    super_offsets: tl.tensor,
    bias: tl.tensor,
    table: tl.tensor,
    num_experts: tl.tensor,
    num_outputs: tl.tensor,
    inputs: tl.tensor,
    width: tl.tensor,
    x_stride: tl.tensor,
    num_spans: tl.tensor,
    alpha: tl.tensor,  # of a `Clamp`, as the next two
    limit: tl.tensor,
    shift: tl.tensor,
    TOP_K: tl.constexpr,
    GROUP: tl.constexpr,
    SUPER: tl.constexpr,
    SPAN: tl.constexpr,
    SPLIT: tl.constexpr,
    FORM: tl.constexpr,
    ADDED: tl.constexpr,
    SCALE_FORM: tl.constexpr,
    OFFSET_FORM: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_GELU: tl.constexpr,
    IS_CLAMPED: tl.constexpr,
    TILE_E: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_T: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One program per (tile of outputs, tile of pairs): gate and up with the activation if IS_GATED, else down."""
    tile = tl.program_id(1)
    numbers = tl.arange(0, TILE_E)
    is_expert = numbers < num_experts
    begins = tl.load(starts + numbers, mask=is_expert, other=0)
    counts = tl.load(starts + numbers + 1, mask=is_expert, other=0) - begins
    tiles = tl.cumsum((counts + TILE_T - 1) // TILE_T, 0)  # those of this expert and of the ones before
    expert = tl.sum((is_expert & (tiles <= tile)).to(tl.int32), 0)
    if expert >= num_experts:
        return
    before = tl.sum(tl.where(numbers < expert, (counts + TILE_T - 1) // TILE_T, 0), 0)
    places = tl.load(starts + expert) + (tile - before) * TILE_T + tl.arange(0, TILE_T)
    in_pairs = places < tl.load(starts + expert + 1)
    outputs = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    rows = places
    if IS_GATED:
        rows = tl.load(order + places, mask=in_pairs, other=0) // TOP_K
    FIRST: tl.constexpr = 0 if IS_GATED else 2
    result = _sums(
        outputs, num_outputs, expert, addresses, factors, x, rows * x_stride, in_pairs, sums, rows * num_spans,
        codes, scales, super_scales, offsets, super_offsets, bias, table, inputs, width,
        FIRST, GROUP, SUPER, SPAN, SPLIT, FORM, ADDED, SCALE_FORM, OFFSET_FORM, HAS_OFFSETS, HAS_BIAS,
        TILE_N, TILE_T, PRECISION,
    )  # fmt: skip
    if IS_GATED:
        up = _sums(
            outputs, num_outputs, expert, addresses, factors, x, rows * x_stride, in_pairs, sums, rows * num_spans,
            codes, scales, super_scales, offsets, super_offsets, bias, table, inputs, width,
            1, GROUP, SUPER, SPAN, SPLIT, FORM, ADDED, SCALE_FORM, OFFSET_FORM, HAS_OFFSETS, HAS_BIAS,
            TILE_N, TILE_T, PRECISION,
        )  # fmt: skip
        if IS_CLAMPED:
            gate = tl.minimum(result, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit)
            result = (up + shift) * gate / (1.0 + tl.exp(-alpha * gate))
        else:
            result = activated(result, IS_GELU) * up
    in_tile = (outputs < num_outputs)[:, None] & in_pairs[None, :]
    tl.store(out + places[None, :] * num_outputs + outputs[:, None], result.to(out.dtype.element_ty), mask=in_tile)


@triton.jit
def weighted_sum_kernel(
    out: tl.tensor,  # [num_tokens, num_outputs]
    outputs: tl.tensor,  # [num_pairs, num_outputs] float32
    weights: tl.tensor,  # [num_tokens, TOP_K] float32
    order: tl.tensor,  # [num_pairs] int64
    places: tl.tensor,  # [num_tokens, TOP_K] int64: of the token's pairs, ascending, so by number of expert
    num_outputs: tl.tensor,
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One program per (token, TILE outputs): weighted sum of the outputs of a token's experts."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = at < num_outputs
    total = tl.zeros([TILE], dtype=tl.float32)
    for choice in range(TOP_K):
        place = tl.load(places + token * TOP_K + choice)
        weight = tl.load(weights + tl.load(order + place))
        total += tl.load(outputs + place * num_outputs + at, mask=mask, other=0.0) * weight
    tl.store(out + token * num_outputs + at, total.to(out.dtype.element_ty), mask=mask)
