"""Triton functions that decode codes and scales in registers, for kernels that multiply by quantised weights.

Each number is exact: 8-bit integers, E2M1 and E4M3 have at most 8 significant bits, which float32, float16 and bfloat16
all hold. Numbers of any other table are rounded to the dtype of the rows.
"""

# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: N803

import triton
import triton.language as tl

INT8 = tl.constexpr(0)  # this and the next five are forms of codes (FORM of the kernels)
E4M3 = tl.constexpr(1)
FLOATS = tl.constexpr(2)  # numbers in the rows' dtype, without scales
UINT4 = tl.constexpr(3)  # integers: code + ADDED; this form and the next two have two codes in a byte
E2M1 = tl.constexpr(4)
TABLE4 = tl.constexpr(5)

FLOAT = tl.constexpr(0)  # scales and offsets as they are; this and the next three are their forms
POWER = tl.constexpr(1)  # float8_e8m0fnu
SMALL_FLOAT = tl.constexpr(2)  # float8_e4m3fn
MULTIPLE = tl.constexpr(3)  # int8, times a float that several groups share


@triton.jit
def e4m3_numbers(codes: tl.tensor) -> tl.tensor:
    """float32 numbers of uint8 codes without NaN: their bits shifted are a float16 that is smaller by 2 ** 8."""
    wide = codes.to(tl.uint16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _e2m1_numbers(codes: tl.tensor) -> tl.tensor:
    """float32 numbers of 4-bit codes: their bits shifted are a float16 that is smaller by 2 ** 14."""
    wide = codes.to(tl.uint16)
    return (((wide & 8) << 12) | ((wide & 7) << 9)).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def numbers_of(codes: tl.tensor, table: tl.tensor, ADDED: tl.constexpr, FORM: tl.constexpr) -> tl.tensor:
    """float32 numbers of uint8 codes, without scales; 4-bit codes are in the lower half of a byte."""
    if FORM == INT8:
        return codes.to(tl.int8, bitcast=True).to(tl.float32)
    elif FORM == E4M3:
        return e4m3_numbers(codes)
    elif FORM == UINT4:
        return (codes.to(tl.int32) + ADDED).to(tl.float32)
    elif FORM == E2M1:
        return _e2m1_numbers(codes)
    else:
        return tl.load(table + codes.to(tl.int32))


@triton.jit
def values_of(
    values: tl.tensor,  # pointer: scales or offsets
    supers: tl.tensor,  # pointer: what they are multiples of
    at: tl.tensor,
    at_super: tl.tensor,
    mask: tl.tensor,
    FORM: tl.constexpr,
) -> tl.tensor:
    """float32 scales or offsets at positions `at`; `supers`: units of those that are integers."""
    stored = tl.load(values + at, mask=mask, other=0)
    if FORM == POWER:
        exponents = stored.to(tl.uint32)
        return tl.where(exponents == 0, 0x400000, exponents << 23).to(tl.uint32).to(tl.float32, bitcast=True)
    elif FORM == SMALL_FLOAT:
        return e4m3_numbers(stored)
    elif FORM == MULTIPLE:
        return stored.to(tl.float32) * tl.load(supers + at_super, mask=mask, other=0.0).to(tl.float32)
    else:
        return stored.to(tl.float32)
