"""Triton kernels that compute each row separately: norms, gated products, and rotary embedding with the write of K and
V.

One program computes a row, with tiles that depend on its shape alone, so its bits do not depend on other rows.
With UNIT_OFFSET a norm multiplies by `1 + weight`, as Gemma's. Numbers are float32 in registers and rounded once.
Checked on CPU in interpreter mode and compiled for NVIDIA targets.
"""

# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: N803

import triton
import triton.language as tl

SILU = tl.constexpr(0)
GELU_TANH = tl.constexpr(1)
SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)


@triton.jit
def norm_kernel(
    out: tl.tensor,  # [num_rows, SIZE], contiguous
    x: tl.tensor,  # [num_rows, SIZE]
    residual: tl.tensor,  # as x; x is added into it where HAS_RESIDUAL
    weight: tl.tensor,  # [SIZE]
    eps: tl.tensor,
    stride_x: tl.tensor,
    stride_residual: tl.tensor,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
) -> None:
    """Root-mean-square norm of one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, TILE)
    inside = at < SIZE
    wide = tl.load(x + row * stride_x + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        at_residual = residual + row * stride_residual + at
        wide += tl.load(at_residual, mask=inside, other=0.0).to(tl.float32)
        rounded = wide.to(residual.dtype.element_ty)
        tl.store(at_residual, rounded, mask=inside)
        wide = rounded.to(tl.float32)
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        factor += 1.0
    normed = wide * tl.rsqrt(tl.sum(wide * wide) / SIZE + eps) * factor
    tl.store(out + row * SIZE + at, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated_kernel(
    out: tl.tensor,  # [num_rows, size], contiguous
    gate: tl.tensor,  # [num_rows, size]
    up: tl.tensor,
    size: tl.tensor,
    stride_gate: tl.tensor,
    stride_up: tl.tensor,
    ACTIVATION: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One tile of `activation(gate) * up` of one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < size
    wide = tl.load(gate + row * stride_gate + at, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(up + row * stride_up + at, mask=inside, other=0.0).to(tl.float32)
    inner = wide
    if ACTIVATION == GELU_TANH:  # 0.5 * (1 + tanh(u)) is the sigmoid of 2 * u
        inner = 2.0 * SQRT_2_OVER_PI * (wide + 0.044715 * wide * wide * wide)
    decay = tl.exp(-tl.abs(inner))
    product = wide * (tl.where(inner >= 0, 1.0, decay) / (1.0 + decay)) * factor
    tl.store(out + row * size + at, product.to(out.dtype.element_ty), mask=inside)


# NOTE: vectors of a step are not specialised on their alignment, so that every batch runs the same binary.
@triton.jit(do_not_specialize=["positions", "slots"])
def rope_kernel(
    q: tl.tensor,  # [num_tokens, NUM_HEADS, head_dim]
    k: tl.tensor,  # [num_tokens, NUM_KV_HEADS, head_dim]
    v: tl.tensor,
    cos: tl.tensor,  # [max_positions, HALF] float32
    sin: tl.tensor,
    positions: tl.tensor,  # [num_tokens] int64
    slots: tl.tensor,  # [num_tokens] int64; -1: neither K nor V is kept
    k_cache: tl.tensor,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, head_dim]
    v_cache: tl.tensor,
    q_norm: tl.tensor,  # [head_dim]
    k_norm: tl.tensor,
    eps: tl.tensor,
    q_stride_token: tl.tensor,
    q_stride_head: tl.tensor,
    k_stride_token: tl.tensor,
    k_stride_head: tl.tensor,
    v_stride_token: tl.tensor,
    v_stride_head: tl.tensor,
    stride_angle: tl.tensor,
    stride_block: tl.tensor,
    stride_kv_head: tl.tensor,
    stride_slot: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_HALF: tl.constexpr,
    TILE_REST: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
) -> None:
    """Rotates one head of q or k of one token in place, and writes one of k or v into its slot of the cache; heads of q
    come first, then those of k, then of v.

    Args:
        HALF, REST: of a head, element i < HALF is rotated with element i + HALF; the last REST are not rotated.
        stride_angle: of `cos` and `sin`, from a position to the next.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if head < NUM_HEADS:
        at = q + token * q_stride_token + head * q_stride_head
        _rope(at, at, q_norm, cos, sin, positions, token, eps, stride_angle, False,
              HALF, REST, TILE_HALF, TILE_REST, HAS_Q_NORM, UNIT_OFFSET)  # fmt: skip
    elif NUM_KV_HEADS > 0:
        slot = tl.load(slots + token)
        is_kept = slot >= 0
        kept = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_slot
        if head < NUM_HEADS + NUM_KV_HEADS:
            kv_head = head - NUM_HEADS
            at = k + token * k_stride_token + kv_head * k_stride_head
            _rope(at, k_cache + kept + kv_head * stride_kv_head, k_norm, cos, sin, positions, token, eps, stride_angle,
                  is_kept, HALF, REST, TILE_HALF, TILE_REST, HAS_K_NORM, UNIT_OFFSET)  # fmt: skip
        else:
            kv_head = head - NUM_HEADS - NUM_KV_HEADS
            source = v + token * v_stride_token + kv_head * v_stride_head
            target = v_cache + kept + kv_head * stride_kv_head
            halves, rest = tl.arange(0, TILE_HALF), tl.arange(0, TILE_REST)
            _copy(source, target, halves, is_kept & (halves < HALF))
            _copy(source, target, HALF + halves, is_kept & (halves < HALF))
            if REST > 0:
                _copy(source, target, 2 * HALF + rest, is_kept & (rest < REST))


@triton.jit
def _copy(source: tl.tensor, target: tl.tensor, at: tl.tensor, mask: tl.tensor) -> None:
    tl.store(target + at, tl.load(source + at, mask=mask, other=0.0), mask=mask)


@triton.jit
def _rope(
    at: tl.tensor,  # pointer: a head of a token, rotated in place
    kept: tl.tensor,  # pointer: where it is stored once more if is_kept
    norm: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    positions: tl.tensor,
    token: tl.tensor,
    eps: tl.tensor,
    stride_angle: tl.tensor,
    is_kept: tl.tensor,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    TILE_HALF: tl.constexpr,
    TILE_REST: tl.constexpr,
    HAS_NORM: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
) -> None:
    halves, rest = tl.arange(0, TILE_HALF), tl.arange(0, TILE_REST)
    in_half, in_rest = halves < HALF, rest < REST
    first = tl.load(at + halves, mask=in_half, other=0.0).to(tl.float32)
    second = tl.load(at + HALF + halves, mask=in_half, other=0.0).to(tl.float32)
    passed = tl.load(at + 2 * HALF + rest, mask=in_rest, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first) + tl.sum(second * second) + tl.sum(passed * passed)
        scale = tl.rsqrt(squares / (2 * HALF + REST) + eps)
        first = first * scale * _factor(norm, halves, in_half, UNIT_OFFSET)
        second = second * scale * _factor(norm, HALF + halves, in_half, UNIT_OFFSET)
        passed = passed * scale * _factor(norm, 2 * HALF + rest, in_rest, UNIT_OFFSET)
    angle = tl.load(positions + token) * stride_angle + halves
    cosines = tl.load(cos + angle, mask=in_half, other=0.0)
    sines = tl.load(sin + angle, mask=in_half, other=0.0)
    dtype = at.dtype.element_ty
    rotated_first = (first * cosines - second * sines).to(dtype)
    rotated_second = (second * cosines + first * sines).to(dtype)
    tl.store(at + halves, rotated_first, mask=in_half)
    tl.store(at + HALF + halves, rotated_second, mask=in_half)
    tl.store(kept + halves, rotated_first, mask=in_half & is_kept)
    tl.store(kept + HALF + halves, rotated_second, mask=in_half & is_kept)
    if REST > 0:
        tl.store(at + 2 * HALF + rest, passed.to(dtype), mask=in_rest)
        tl.store(kept + 2 * HALF + rest, passed.to(dtype), mask=in_rest & is_kept)


@triton.jit
def _factor(weight: tl.tensor, at: tl.tensor, mask: tl.tensor, UNIT_OFFSET: tl.constexpr) -> tl.tensor:
    factor = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    return factor + 1.0 if UNIT_OFFSET else factor
