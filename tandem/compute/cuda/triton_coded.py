"""Triton kernels for products with quantised weights. `sum_of_split` describes the parameters.

A group of inputs (128 of a longer one) is summed from zero by a matrix product of exact numbers, times its scale, and
added to its split of 1,024 inputs in order; then its offset times the sum of its inputs. Splits are added in order, by
one program or by `combine_kernel`, so a token's bits do not depend on the number of tokens. Outputs are a tile's first
dimension, so that only the width of matrix products varies with the number of tokens.

Checked on CPU in interpreter mode, compiled for NVIDIA targets, and run on an H200 (decision 116).
"""

# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: N803, N806

import triton
import triton.language as tl

from tandem.compute.cuda.triton_numbers import FLOATS, UINT4, numbers_of, values_of

# NOTE: arguments that vary with the batch are not specialised on, so that every batch runs the same binary.
BATCH_ARGUMENTS = ["num_tokens", "num_splits"]


@triton.jit
def _inputs(x: tl.tensor, tokens: tl.tensor, first: tl.tensor, inputs: tl.tensor, in_tokens: tl.tensor,
            WIDTH: tl.constexpr) -> tl.tensor:  # fmt: skip
    """[WIDTH, tokens]: WIDTH inputs from `first` on, of the rows at pointers `x`; zeros past the end of a row."""
    at = first + tl.arange(0, WIDTH)
    return tl.load(x + tokens[None, :] + at[:, None], mask=(at < inputs)[:, None] & in_tokens[None, :], other=0.0)


@triton.jit
def sum_of_split(
    split: tl.tensor,
    x: tl.tensor,  # pointer
    token_rows: tl.tensor,  # [TILE_T] int64: where the tokens' rows begin
    in_tokens: tl.tensor,  # [TILE_T] bool
    sums: tl.tensor,  # pointer [num_tokens, spans] float32
    sum_rows: tl.tensor,  # [TILE_T] int64
    outputs: tl.tensor,  # [TILE_N]: numbers of rows of the matrix
    in_outputs: tl.tensor,
    codes: tl.tensor,  # pointer, as the next five
    scales: tl.tensor,
    super_scales: tl.tensor,
    offsets: tl.tensor,
    super_offsets: tl.tensor,
    table: tl.tensor,
    factor: tl.tensor,
    inputs: tl.tensor,
    width: tl.tensor,
    GROUP: tl.constexpr,
    SUPER: tl.constexpr,
    SPAN: tl.constexpr,
    SPLIT: tl.constexpr,
    FORM: tl.constexpr,
    ADDED: tl.constexpr,
    SCALE_FORM: tl.constexpr,
    OFFSET_FORM: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_T: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """[TILE_N, TILE_T] float32: sums over one split of the inputs.

    Args:
        sums: sums of inputs that share an offset, which multiplies them; read if HAS_OFFSETS.
        codes, scales, super_scales, offsets, super_offsets, table, factor: of a `CodedMatrix` packed in halves, see
            `halves`; floats of 8 bits as uint8.
        inputs, width: number of inputs, and bytes of a row of codes (or floats, if FORM is FLOATS).
        GROUP, SUPER: inputs that share a scale (0 = all), and that share the unit of int8 scales (0 = none).
        SPAN, SPLIT: inputs that lie together in memory, and inputs that are summed from zero, see `halves`.
        FORM, ADDED: how codes are decoded, see `triton_numbers`; so for scales and offsets their own FORM.
        TILE_N, TILE_T: outputs and tokens of a tile. PRECISION: of `tl.dot`.
    """
    IS_HALVED: tl.constexpr = FORM >= UINT4
    STEP: tl.constexpr = SPAN // 2 if IS_HALVED else SPAN  # bytes of a span, and inputs of a matrix product
    NUM_PARTS: tl.constexpr = 2 if IS_HALVED and GROUP == STEP else 1  # scales of a span
    acc = tl.zeros([TILE_N, TILE_T], dtype=tl.float32)
    code_rows = outputs.to(tl.int64) * width
    num_groups = 1
    num_supers = 1
    if GROUP > 0:
        num_groups = tl.cdiv(inputs, GROUP)
    if SUPER > 0:
        num_supers = tl.cdiv(inputs, SUPER)
    end = tl.minimum(inputs, (split + 1) * SPLIT)
    for first in range(split * SPLIT, end, SPAN):
        at = first // SPAN * STEP + tl.arange(0, STEP)
        in_codes = in_outputs[:, None] & (at < width)[None, :]
        stored = tl.load(codes + code_rows[:, None] + at[None, :], mask=in_codes, other=0)
        low = _inputs(x, token_rows, first, inputs, in_tokens, STEP)
        if IS_HALVED:
            high = _inputs(x, token_rows, first + STEP, inputs, in_tokens, STEP)
            numbers = numbers_of(stored & 15, table, ADDED, FORM).to(low.dtype)
            upper = numbers_of(stored >> 4, table, ADDED, FORM).to(low.dtype)
            part = tl.dot(numbers, low, input_precision=PRECISION)
            if NUM_PARTS == 1:
                part = tl.dot(upper, high, part, input_precision=PRECISION)
        elif FORM == FLOATS:
            part = tl.dot(stored, low, input_precision=PRECISION)
        else:
            part = tl.dot(numbers_of(stored, table, ADDED, FORM).to(low.dtype), low, input_precision=PRECISION)
        if FORM == FLOATS:
            acc += part
        else:
            for half in tl.static_range(NUM_PARTS):
                group = 0
                super_group = 0
                if GROUP > 0:
                    group = (first + half * STEP) // GROUP
                if SUPER > 0:
                    super_group = (first + half * STEP) // SUPER
                if half == 1:
                    part = tl.dot(upper, high, input_precision=PRECISION)
                in_groups = in_outputs & (group < num_groups)
                at_scale, at_super = outputs * num_groups + group, outputs * num_supers + super_group
                scale = values_of(scales, super_scales, at_scale, at_super, in_groups, SCALE_FORM) * factor
                acc += part * scale[:, None]
                if HAS_OFFSETS:
                    offset = values_of(offsets, super_offsets, at_scale, at_super, in_groups, OFFSET_FORM)
                    at_sum = first // (SPAN // NUM_PARTS) + half
                    acc += offset[:, None] * tl.load(sums + sum_rows + at_sum, mask=in_tokens, other=0.0)[None, :]
    return acc


@triton.jit(do_not_specialize=BATCH_ARGUMENTS)
def sums_kernel(
    out: tl.tensor,  # [num_tokens, spans] float32
    x: tl.tensor,
    x_stride: tl.tensor,
    inputs: tl.tensor,
    num_spans: tl.tensor,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One program per (token, TILE spans): sums of the inputs that share an offset."""
    token = tl.program_id(0).to(tl.int64)
    spans = tl.program_id(1) * TILE + tl.arange(0, TILE)
    at = spans[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    row = tl.load(x + token * x_stride + at, mask=at < inputs, other=0.0).to(tl.float32)
    tl.store(out + token * num_spans + spans, tl.sum(row, 1), mask=spans < num_spans)


@triton.jit(do_not_specialize=BATCH_ARGUMENTS)
def coded_kernel(
    out: tl.tensor,  # [num_tokens, num_outputs]; written unless IS_SPLIT
    partials: tl.tensor,  # [num_splits, num_tokens, num_outputs] float32; written otherwise
    x: tl.tensor,
    sums: tl.tensor,
    bias: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    super_scales: tl.tensor,
    offsets: tl.tensor,
    super_offsets: tl.tensor,
    table: tl.tensor,
    factor: tl.tensor,
    num_tokens: tl.tensor,
    num_outputs: tl.tensor,
    inputs: tl.tensor,
    width: tl.tensor,
    x_stride: tl.tensor,
    num_spans: tl.tensor,
    num_splits: tl.tensor,
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
    IS_SPLIT: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_T: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One program per (tile of outputs, tile of tokens, split); without IS_SPLIT one for all splits."""
    outputs = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    tokens = tl.program_id(1) * TILE_T + tl.arange(0, TILE_T)
    in_outputs, in_tokens = outputs < num_outputs, tokens < num_tokens
    wide = tokens.to(tl.int64)
    begin, end = 0, num_splits
    if IS_SPLIT:
        begin = tl.program_id(2)
        end = begin + 1
    total = tl.zeros([TILE_N, TILE_T], dtype=tl.float32)
    for split in range(begin, end):
        total += sum_of_split(
            split,
            x,
            wide * x_stride,
            in_tokens,
            sums,
            wide * num_spans,
            outputs,
            in_outputs,
            codes,
            scales,
            super_scales,
            offsets,
            super_offsets,
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
    at = wide[None, :] * num_outputs + outputs[:, None]
    in_tile = in_outputs[:, None] & in_tokens[None, :]
    if IS_SPLIT:
        first_row = tl.program_id(2).to(tl.int64) * num_tokens
        tl.store(partials + first_row * num_outputs + at, total, mask=in_tile)
    else:
        if HAS_BIAS:
            total += tl.load(bias + outputs, mask=in_outputs, other=0.0).to(tl.float32)[:, None]
        tl.store(out + at, total.to(out.dtype.element_ty), mask=in_tile)


@triton.jit
def _added(partials: tl.tensor, token: tl.tensor, outputs: tl.tensor, mask: tl.tensor, num_splits: tl.tensor,
           num_tokens: tl.tensor, num_outputs: tl.tensor, TILE: tl.constexpr) -> tl.tensor:  # fmt: skip
    """[TILE] float32: a token's splits, added in order."""
    total = tl.zeros([TILE], dtype=tl.float32)
    for split in range(num_splits):
        row = tl.cast(split, tl.int64) * num_tokens + token
        total += tl.load(partials + row * num_outputs + outputs, mask=mask, other=0.0)
    return total


@triton.jit(do_not_specialize=BATCH_ARGUMENTS)
def combine_kernel(
    out: tl.tensor,  # [num_tokens, num_outputs]
    partials: tl.tensor,
    bias: tl.tensor,
    num_tokens: tl.tensor,
    num_outputs: tl.tensor,
    num_splits: tl.tensor,
    HAS_BIAS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One program per (token, TILE outputs): adds the splits."""
    token = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = outputs < num_outputs
    total = _added(partials, token, outputs, mask, num_splits, num_tokens, num_outputs, TILE)
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * num_outputs + outputs, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def activated(gate: tl.tensor, IS_GELU: tl.constexpr) -> tl.tensor:
    """SiLU, or GELU with tanh, in float32. NOTE: tanh is made of exp, since the interpreter lacks libdevice's."""
    if IS_GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return 0.5 * gate * (2.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0))
    else:
        return gate / (1.0 + tl.exp(-gate))


@triton.jit(do_not_specialize=BATCH_ARGUMENTS)
def gated_combine_kernel(
    out: tl.tensor,  # [num_tokens, num_outputs]
    gates: tl.tensor,  # [num_splits, num_tokens, num_outputs] float32
    ups: tl.tensor,
    gate_bias: tl.tensor,
    up_bias: tl.tensor,
    num_tokens: tl.tensor,
    num_outputs: tl.tensor,
    num_splits: tl.tensor,
    HAS_GATE_BIAS: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr,
    IS_GELU: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One program per (token, TILE outputs): adds the splits and computes `activation(gate) * up`, rounded once."""
    token = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = outputs < num_outputs
    gate = _added(gates, token, outputs, mask, num_splits, num_tokens, num_outputs, TILE)
    up = _added(ups, token, outputs, mask, num_splits, num_tokens, num_outputs, TILE)
    if HAS_GATE_BIAS:
        gate += tl.load(gate_bias + outputs, mask=mask, other=0.0).to(tl.float32)
    if HAS_UP_BIAS:
        up += tl.load(up_bias + outputs, mask=mask, other=0.0).to(tl.float32)
    result = activated(gate, IS_GELU) * up
    tl.store(out + token * num_outputs + outputs, result.to(out.dtype.element_ty), mask=mask)
