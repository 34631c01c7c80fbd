"""GGUF files that are damaged, contradict themselves or say what is not served: each refused by name, and nothing read
outside of them.
"""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.errors import CheckpointError, CorruptCheckpointError, UnsupportedCheckpointError
from tandem.models.gguf.convert import converted
from tandem.models.gguf.file import GgufFile
from tests.helpers.checkpoints import save_tiny_llama, save_tiny_qwen3_moe
from tests.helpers.gguf_files import write_gguf


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", num_hidden_layers=1)


@pytest.fixture(scope="module")
def content(checkpoint: Path) -> bytes:
    return write_gguf(checkpoint, checkpoint.parent / "whole.gguf").read_bytes()


def header_bytes(path: Path) -> int:
    """Offset at which the tensors begin."""
    return int(gguf.GGUFReader(path).data_offset)


def refusal(path: Path, content: bytes, kind: type[CheckpointError] = CorruptCheckpointError) -> str:
    path.write_bytes(content)
    with pytest.raises(kind) as caught:
        converted(path, path.parent / "cache")
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_wrong_magic_and_versions(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.gguf"
    assert "begins with b'GGML'" in refusal(path, b"GGML" + content[4:])
    for number, noun in ((1, "version 1;"), (3 << 24, "it is big-endian"), (9, "version 9;")):
        message = refusal(path, content[:4] + struct.pack("<I", number) + content[8:], UnsupportedCheckpointError)
        assert noun in message
    assert "cannot be read as GGUF" in refusal(path, b"")


def test_every_beginning_of_a_file_is_refused_as_truncated(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    end = header_bytes(path)
    for length in [*range(4, 64), *range(64, end, 97), end, (end + len(content)) // 2, len(content) - 65]:
        path.write_bytes(content[:length])
        named = r"(truncated|than its \d+ bytes can hold|than the file can)[^;]*; download it again$"
        with pytest.raises(CorruptCheckpointError, match=named):
            GgufFile(path)


@given(position=st.integers(0, 1 << 20), value=st.integers(0, 255), data=st.data())
def test_a_changed_header_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, position: int, value: int, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "changed.gguf"
    changed = bytearray(content)
    size = data.draw(st.sampled_from([1, 4, 8]))
    start = position % (9000 - size)
    changed[start : start + size] = bytes([value]) * size
    path.write_bytes(changed)
    try:
        with GgufFile(path) as file:
            for entry in file.tensors.values():
                assert file.rows(entry).nbytes == entry.num_bytes
    except CheckpointError:
        pass


def replaced(content: bytes, name: str, offset: int, code: str, value: int) -> bytes:
    """The file with a number of a tensor's entry replaced. `offset`: from the end of its name."""
    start = content.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name) + offset
    return content[:start] + struct.pack(code, value) + content[start + struct.calcsize(code) :]


def test_entries_of_tensors(tmp_path: Path, content: bytes) -> None:
    path, name = tmp_path / "a.gguf", "blk.0.attn_q.weight"  # of two dimensions: number, 2 sizes, type, offset
    assert "has 9 dimensions" in refusal(path, replaced(content, name, 0, "<I", 9))
    assert "of type number 999" in refusal(path, replaced(content, name, 20, "<I", 999), UnsupportedCheckpointError)
    assert "of type I32" in refusal(path, replaced(content, name, 20, "<I", 26), UnsupportedCheckpointError)
    assert "ends at byte" in refusal(path, replaced(content, name, 24, "<Q", len(content)))
    assert "ends at byte" in refusal(path, replaced(content, name, 24, "<Q", 2**64 - 32))
    assert "ends at byte" in refusal(path, replaced(content, name, 12, "<Q", 2**63))
    assert "has the shape" in refusal(path, replaced(content, name, 4, "<Q", 0))
    assert "blocks of 256" in refusal(path, replaced(content, name, 20, "<I", 12))
    twin = content.replace(b"blk.0.attn_k.weight", b"blk.0.attn_v.weight")
    assert "has two tensors 'blk.0.attn_v.weight'" in refusal(path, twin)
    odd = content.replace(b"blk.0.attn_k.weight", b"blk.0.attn_z.weight")
    assert "none of LlamaForCausalLM's" in refusal(path, odd, UnsupportedCheckpointError)


def test_counts_that_no_file_could_hold(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.gguf"
    assert "promises 18446744073709551615 tensors" in refusal(path, content[:8] + b"\xff" * 8 + content[16:])
    assert "promises 18446744073709551615 metadata values" in refusal(path, content[:16] + b"\xff" * 8 + content[24:])
    start = content.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8
    message = refusal(path, content[:start] + struct.pack("<Q", 2**60) + content[start + 8 :])
    assert "tokenizer.ggml.tokens promises 1152921504606846976 strings" in message


MISSING = (
    "llama.block_count",
    "llama.context_length",
    "llama.embedding_length",
    "llama.feed_forward_length",
    "llama.attention.head_count",
    "llama.attention.layer_norm_rms_epsilon",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.merges",
)


@pytest.mark.parametrize("name", MISSING)
def test_missing_metadata_is_named(tmp_path: Path, checkpoint: Path, name: str) -> None:
    values: dict[str, Any] = {name.replace(".", "__"): None}
    file = write_gguf(checkpoint, tmp_path / "a.gguf", **values)
    with pytest.raises(CorruptCheckpointError) as caught:
        converted(file, tmp_path / "cache")
    assert name.removeprefix("llama.") in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"general__architecture": "mamba"}, "general.architecture='mamba' is not served from GGUF; supported: llama"),
        ({"llama__expert_count": 8}, "expert_used_count must be an integer"),
        ({"llama__expert_used_count": 2}, "expert_used_count=2 is not served"),
        ({"llama__expert_count": 8, "llama__expert_used_count": 2}, "'blk.0.ffn_down.weight' is none of Mixtral"),
        ({"llama__attention__head_count_kv": [2]}, "head_count_kv must be an integer"),
        ({"llama__attention__value_length": 8}, "attention.value_length=8 is not served"),
        ({"llama__rope__dimension_count": 4}, "rope.dimension_count=4 is not served"),
        ({"llama__vocab_size": 5}, "vocab_size=5 is not served"),
        ({"llama__rope__scaling__type": "longrope"}, 'rope.scaling.type="longrope" is not served'),
        ({"tokenizer__ggml__model": "rwkv"}, "tokenizer.ggml.model='rwkv' is not served"),
        ({"tokenizer__ggml__model": "llama", "tokenizer__ggml__merges": None}, "scores must have one number a token"),
        ({"tokenizer__ggml__pre": "exaone"}, "tokenizer.ggml.pre='exaone': how this tokenizer splits"),
        ({"tokenizer__ggml__add_eos_token": True}, "add_eos_token=true is not served"),
        ({"tokenizer__ggml__eos_token_id": 4096}, "eos_token_id=4096 is no token"),
        ({"tokenizer__ggml__merges": ["a bc"]}, "merges has 'a bc'"),
        ({"tokenizer__ggml__token_type": [1, 2]}, "token_type must have one number a token"),
        ({"tokenizer__ggml__bos_token_id": None, "tokenizer__ggml__add_bos_token": True}, "bos_token_id is missing"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    tmp_path: Path, checkpoint: Path, values: dict[str, Any], message: str
) -> None:
    file = write_gguf(checkpoint, tmp_path / "a.gguf", **values)
    with pytest.raises(CheckpointError) as caught:
        converted(file, tmp_path / "cache")
    assert message in str(caught.value)


def test_a_vector_is_no_stack_of_experts(tmp_path: Path) -> None:
    plain = save_tiny_qwen3_moe(tmp_path / "plain", num_hidden_layers=1, mlp_only_layers=[])
    vector = {"blk.1.ffn_up_exps.weight": np.zeros(32, np.float32)}
    file = write_gguf(plain, tmp_path / "a.gguf", extra=vector)
    with pytest.raises(CorruptCheckpointError, match=r"'blk\.1\.ffn_up_exps\.weight' is a vector and no stack"):
        converted(file, tmp_path / "cache")


def test_weights_that_are_no_numbers(tmp_path: Path, checkpoint: Path, content: bytes) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with GgufFile(path) as file:
        entry = file.tensors["blk.0.ffn_up.weight"]
    changed = bytearray(content)
    changed[entry.offset : entry.offset + 4] = np.float32(np.nan).tobytes()
    assert "tensor 'blk.0.ffn_up.weight': row 0 has values" in refusal(path, bytes(changed))
