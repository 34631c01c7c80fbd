"""Coded rows against decoders written independently: transformers', and two of our own where it has none."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray
from transformers.integrations.gguf import dequant

from tandem.core.errors import CorruptCheckpointError
from tandem.models.gguf.decode import decoded
from tandem.models.gguf.file import SERVED_TYPES
from tests.helpers.gguf_files import SCALES, random_rows

CODED = [name for name in SERVED_TYPES if name not in ("F32", "F16", "BF16")]


def values_of(rows: NDArray[np.uint8], type_name: str) -> NDArray[np.float32]:
    stored = b"".join(decoded(rows, type_name, "float32", "a tensor"))
    return np.frombuffer(stored, np.float32).reshape(len(rows), -1)


def fives(rows: NDArray[np.uint8], with_minimum: bool) -> NDArray[np.float32]:
    """Q5_0 and Q5_1 one value after another: a nibble each, whose fifth bits lie together before them."""
    found: list[float] = []
    for block in rows.reshape(-1, 24 if with_minimum else 22):
        scale = float(block[:2].view(np.float16)[0])
        minimum = float(block[2:4].view(np.float16)[0]) if with_minimum else -16 * scale
        start = 4 if with_minimum else 2
        fifth = int.from_bytes(block[start : start + 4].tobytes(), "little")
        for index in range(32):
            byte = int(block[start + 4 + index % 16])
            nibble = byte & 15 if index < 16 else byte >> 4
            found.append(scale * (nibble | (fifth >> index & 1) << 4) + minimum)
    return np.array(found, np.float32).reshape(len(rows), -1)


def by_transformers(rows: NDArray[np.uint8], type_name: str) -> NDArray[np.float32]:
    number = GGMLQuantizationType[type_name].value
    found: NDArray[np.float32] = dequant.dequantize(torch.from_numpy(rows).reshape(-1), number).numpy()
    return found.reshape(len(rows), -1)


def mxfp4(rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    """OCP Microscaling Formats 1.0: a power of two for 32 numbers of 4 bits, one half of them in each half of bytes."""
    magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    found: list[float] = []
    for block in rows.reshape(-1, 17):
        codes = [int(byte) & 15 for byte in block[1:]] + [int(byte) >> 4 for byte in block[1:]]
        found += [(-1) ** (code >> 3) * magnitudes[code & 7] * 2.0 ** (int(block[0]) - 127) for code in codes]
    return np.array(found, np.float32).reshape(len(rows), -1)


ORACLES: dict[str, Callable[[NDArray[np.uint8]], NDArray[np.float32]]] = {
    "MXFP4": mxfp4,
    "Q5_0": lambda rows: fives(rows, with_minimum=False),
    "Q5_1": lambda rows: fives(rows, with_minimum=True),
}


@pytest.mark.parametrize("type_name", CODED)
def test_codes_mean_what_others_say_they_mean(type_name: str) -> None:
    rows = random_rows(type_name)
    oracle = ORACLES[type_name] if type_name in ORACLES else partial(by_transformers, type_name=type_name)
    assert np.allclose(values_of(rows, type_name), oracle(rows), rtol=1e-6, atol=1e-7)


def test_sixteen_bits_are_rounded_as_torch_rounds_them() -> None:
    values = np.random.default_rng(3).normal(0, 1, (4, 64)).astype(np.float32)
    values[0, :3] = (1 + 2**-8, 1 + 3 * 2**-8, -0.0)  # ties to even, both ways, and a sign
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        stored = b"".join(decoded(values.view(np.uint8), "F32", name, "a tensor"))
        assert stored == torch.from_numpy(values).to(dtype).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("type_name", [name for name in CODED if name != "MXFP4"])
@pytest.mark.parametrize("scale", [np.nan, np.inf])
def test_a_scale_that_is_no_number_is_refused_with_the_row(type_name: str, scale: float) -> None:
    rows = random_rows(type_name)
    offset = SCALES.get(type_name, (0,))[0]
    rows[3, offset : offset + 2] = np.array([scale], np.float16).view(np.uint8)
    with pytest.raises(CorruptCheckpointError, match=r"a tensor: row 3 has values .* its \w+ blocks is damaged"):
        list(decoded(rows, type_name, "bfloat16", "a tensor"))


def test_a_value_too_large_for_its_dtype_is_refused() -> None:
    rows = np.full((1, 8), 3.4e38, np.float32).view(np.uint8)
    for dtype in ("bfloat16", "float16"):
        with pytest.raises(CorruptCheckpointError, match=f"too large for {dtype}"):
            list(decoded(rows, "F32", dtype, "a tensor"))
