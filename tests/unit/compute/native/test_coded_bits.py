"""The bits of compiled products with codes, as hashes: a change of the kernels that rounds otherwise is a failure here.

Tests by bounds miss it, and so do those that compare one number of rows with another. Bits are the same with AVX2 and
AVX-512; with AVX-512 BF16 some products of bfloat16 rows have others. If a change is meant, the failure shows the new
hashes; prefill and decode workers before and after it then differ in bits, which belongs in the changelog.
"""

import hashlib
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from tandem.compute.codes import CodedMatrix, CodeKind
from tandem.compute.native.bindings import NativeKernels
from tests.helpers.coded_matrices import E2M1, INT4
from tests.helpers.native_kernels import ARCHITECTURES, load_or_skip, processor_flags

NUM_ROWS, OUTPUTS, INPUTS = 13, 35, 520
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    kind: CodeKind
    group_size: int
    scales: torch.dtype = torch.float32
    has_offsets: bool = False
    table: torch.Tensor = INT4


CASES = {
    "int4 in groups of 128": Case(CodeKind.TABLE4, 128, torch.bfloat16),
    "int4 in groups of 32": Case(CodeKind.TABLE4, 32, torch.bfloat16),
    "int4 in groups of 32 with offsets": Case(CodeKind.TABLE4, 32, torch.float16, has_offsets=True),
    "int8 by channel": Case(CodeKind.INT8, INPUTS),
    "int8 in groups of 128": Case(CodeKind.INT8, 128),
    "int8 in groups of 32": Case(CodeKind.INT8, 32),
    "fp8 in groups of 128": Case(CodeKind.E4M3, 128),
    "nvfp4": Case(CodeKind.TABLE4, 16, torch.float8_e4m3fn, table=E2M1),
    "mxfp4": Case(CodeKind.TABLE4, 32, torch.float8_e8m0fnu, table=E2M1),
}
PINNED = {
    "int4 in groups of 128, float32": "213126ce666f",
    "int4 in groups of 128, float32, rounded": "974ead174638",
    "int4 in groups of 128, bfloat16": "32851a8428f5",
    "int4 in groups of 128, bfloat16, rounded": "fcdb3369fc7d",
    "int4 in groups of 128, float16": "fe94ca3977e6",
    "int4 in groups of 128, float16, rounded": "eb85a8d9d007",
    "int4 in groups of 32, float32": "debf156b4f39",
    "int4 in groups of 32, float32, rounded": "8be4beceeac4",
    "int4 in groups of 32, bfloat16": "7f48009cc6c1",
    "int4 in groups of 32, bfloat16, rounded": "17926ea74513",
    "int4 in groups of 32, float16": "35bee6c9e148",
    "int4 in groups of 32, float16, rounded": "79443a63bad9",
    "int4 in groups of 32 with offsets, float32": "1311d75e4655",
    "int4 in groups of 32 with offsets, float32, rounded": "c184027c9b06",
    "int4 in groups of 32 with offsets, bfloat16": "b455f5633121",
    "int4 in groups of 32 with offsets, bfloat16, rounded": "ed5132fc219e",
    "int4 in groups of 32 with offsets, float16": "36f2119997de",
    "int4 in groups of 32 with offsets, float16, rounded": "10d84fdef68b",
    "int8 by channel, float32": "eb36cdff303b",
    "int8 by channel, float32, rounded": "2aaa8b7c1848",
    "int8 by channel, bfloat16": "0ab8d4ecfd24",
    "int8 by channel, bfloat16, rounded": "d57bf140134d",
    "int8 by channel, float16": "8e41f402e78f",
    "int8 by channel, float16, rounded": "ca7badbb9dea",
    "int8 in groups of 128, float32": "110ea3625247",
    "int8 in groups of 128, float32, rounded": "85eaf9be8fe8",
    "int8 in groups of 128, bfloat16": "d3f346e9950d",
    "int8 in groups of 128, bfloat16, rounded": "da082cabbd68",
    "int8 in groups of 128, float16": "1dbab539198a",
    "int8 in groups of 128, float16, rounded": "e5ece8527c5d",
    "int8 in groups of 32, float32": "b7b8478c87dc",
    "int8 in groups of 32, float32, rounded": "eccaf1967b31",
    "int8 in groups of 32, bfloat16": "79d37ba383e8",
    "int8 in groups of 32, bfloat16, rounded": "f3c7b2bc03e8",
    "int8 in groups of 32, float16": "4fc946dcab1e",
    "int8 in groups of 32, float16, rounded": "c75560c7536b",
    "fp8 in groups of 128, float32": "c885b4bf563c",
    "fp8 in groups of 128, bfloat16": "3ed0bb46fc4c",
    "fp8 in groups of 128, float16": "e61f7de4fa88",
    "nvfp4, float32": "62f87583a0c2",
    "nvfp4, float32, rounded": "c7c28af61474",
    "nvfp4, bfloat16": "c60dda2ae876",
    "nvfp4, bfloat16, rounded": "782ddbf0266d",
    "nvfp4, float16": "e408cf3f0b08",
    "nvfp4, float16, rounded": "9fd19f6f60b9",
    "mxfp4, float32": "6e9aec9c30c5",
    "mxfp4, float32, rounded": "6eacf8f35069",
    "mxfp4, bfloat16": "a4293a25a9b0",
    "mxfp4, bfloat16, rounded": "07a6e091ff36",
    "mxfp4, float16": "25f8f6c917ab",
    "mxfp4, float16, rounded": "7ab42af5a371",
}
PINNED_WITH_BF16 = {
    "int4 in groups of 128, bfloat16": "c11c2bbd56bc",
    "int4 in groups of 32, bfloat16": "9e301a796c1f",
    "int4 in groups of 32 with offsets, bfloat16": "854dcfb8c6e5",
    "int8 by channel, bfloat16": "6d1c6f8f3220",
    "int8 in groups of 128, bfloat16": "9660ca3fcc18",
    "int8 in groups of 32, bfloat16": "981acfe6c691",
    "fp8 in groups of 128, bfloat16": "e9aeb8561cb3",
}
"""Those that differ with AVX-512 BF16."""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_products_have_the_bits_that_they_had(architecture: str) -> None:
    flags = processor_flags()
    if "fma" not in flags:
        pytest.skip("this processor has neither AVX2 nor AVX-512")
    kernels = load_or_skip(architecture)
    has_bf16 = architecture == "native" and "avx512_bf16" in flags
    found = {name: digest for case in CASES for name, digest in hashes(kernels, case).items()}
    assert found == PINNED | (PINNED_WITH_BF16 if has_bf16 else {})


def hashes(kernels: NativeKernels, case: str) -> dict[str, str]:
    """Of products in float32, by case, dtype of rows and whether these are rounded to 8 bits."""
    matrix, found = coded(CASES[case]), {}
    for dtype in DTYPES:
        for rounds in (False, True) if matrix.has_integers else (False,):
            packed = kernels.pack_coded(replace(matrix, rounds_rows=rounds))
            product = kernels.coded_linear(rows(dtype), packed, out_dtype=torch.float32)
            name = f"{case}, {str(dtype).removeprefix('torch.')}{', rounded' if rounds else ''}"
            found[name] = hashlib.sha256(product.numpy().tobytes()).hexdigest()[:12]
    return found


def rows(dtype: torch.dtype) -> torch.Tensor:
    """Of all bits of a float32 and of very different sizes, so that every order of a sum gives another."""
    source = np.random.RandomState(1)  # NOTE: its numbers never change; torch's depend on the processor
    shape = (NUM_ROWS, INPUTS)
    numbers = source.randint(-(1 << 23), 1 << 23, shape) * 2.0 ** source.randint(-27, -20, shape)
    return torch.from_numpy(numbers.astype(np.float32)).to(dtype)


def coded(case: Case) -> CodedMatrix:
    source = np.random.RandomState(2)
    groups = -(-INPUTS // case.group_size)
    is_table = case.kind is CodeKind.TABLE4
    codes = source.randint(0, 256, (OUTPUTS, INPUTS // 2 if is_table else INPUTS)).astype(np.uint8)
    if case.kind is CodeKind.E4M3:
        codes[codes & 0x7F == 0x7F] = 0x7E  # NOTE: the others are of NaN
    views = {CodeKind.INT8: torch.int8, CodeKind.E4M3: torch.float8_e4m3fn}
    scales = torch.from_numpy(source.randint(1000, 2000, (OUTPUTS, groups)) / 8192)
    offsets = torch.from_numpy(source.randint(-999, 1000, (OUTPUTS, groups)) / 777).float()
    return CodedMatrix(
        kind=case.kind,
        shape=(OUTPUTS, INPUTS),
        codes=torch.from_numpy(codes).view(views.get(case.kind, torch.uint8)),
        scales=scales.float().to(case.scales),
        group_size=case.group_size,
        table=case.table if is_table else None,
        offsets=offsets if case.has_offsets else None,
        factor=0.37,
    )
