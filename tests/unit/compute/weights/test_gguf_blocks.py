"""GGUF's blocks as codes: the numbers of the package `gguf`, to the last bit, and what they take in memory."""

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from tandem.architecture.tensors import TensorSpec
from tandem.compute.codes import CodedMatrix
from tandem.compute.weights import gguf_blocks
from tandem.compute.weights.gguf_blocks import TYPES, GgufBlocks
from tandem.core.errors import CorruptCheckpointError
from tandem.models.gguf.file import SERVED_TYPES
from tests.helpers.gguf_files import SCALES, random_rows

EACH_TYPE = pytest.mark.parametrize("type_name", TYPES)
NUM_ROWS, BLOCKS = 7, 3


def matrix_of(type_name: str, rows: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> CodedMatrix:
    coding = GgufBlocks(type_name, None)
    weight = TensorSpec("a.weight", (len(rows), BLOCKS * TYPES[type_name].size))
    assert [part.shape for part in coding.checkpoint_tensors(weight)] == [rows.shape]
    matrix = coding.read(weight, {weight.name: torch.from_numpy(rows)})
    assert coding.layout(weight).is_of(matrix)
    return matrix


@EACH_TYPE
def test_numbers_are_those_of_gguf(type_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, rows = GGMLQuantizationType[type_name], random_rows(type_name, NUM_ROWS, BLOCKS)
    assert GGML_QUANT_SIZES[kind] == (TYPES[type_name].size, TYPES[type_name].num_bytes)
    monkeypatch.setattr(gguf_blocks, "_PIECE_BYTES", 2 * rows.shape[1])  # NOTE: several pieces, the last one shorter
    assert np.array_equal(matrix_of(type_name, rows).decode().numpy(), dequantize(rows, kind))


def test_every_type_of_codes_that_is_read_is_known() -> None:
    assert set(TYPES) == set(SERVED_TYPES) - {"F32", "F16", "BF16"}


@EACH_TYPE
def test_a_scale_that_is_no_number_is_refused_with_the_row(type_name: str) -> None:
    rows = random_rows(type_name, NUM_ROWS, BLOCKS)
    if type_name == "MXFP4":
        rows[3, 0] = 255
    else:
        offset = SCALES.get(type_name, (0,))[-1]
        rows[3, offset : offset + 2] = np.array([np.inf], np.float16).view(np.uint8)
    with pytest.raises(
        CorruptCheckpointError, match=rf"a\.weight: row 3 has values .* its {type_name} blocks is damaged"
    ):
        matrix_of(type_name, rows)


def test_rows_that_are_not_made_of_blocks_are_refused() -> None:
    with pytest.raises(
        CorruptCheckpointError, match=r"rows of 300 numbers, which are not made of Q4_K's blocks of 256"
    ):
        GgufBlocks("Q4_K", None).checkpoint_tensors(TensorSpec("a.weight", (2, 300)))
