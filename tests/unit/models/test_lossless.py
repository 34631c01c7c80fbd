"""Lossless checkpoints: the same bits in two thirds of the bytes, and damage is refused by name."""

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tandem.compute.torch.kernels import TorchKernels
from tandem.core.errors import CheckpointError, ConfigurationError, CorruptCheckpointError, UnsupportedCheckpointError
from tandem.models.checkpoint import open_checkpoint
from tandem.models.convert import Conversion, convert
from tandem.models.loader import LoadedModel, load_model
from tandem.models.lossless import file as lossless_file
from tandem.models.lossless import writer as lossless_writer
from tandem.models.lossless.exponents import DamagedChunkError, decode, encode
from tandem.models.output_directory import OutputDirectory
from tests.helpers.checkpoints import save_tiny_llama, save_tiny_qwen3_moe
from tests.helpers.parameters import tensors_of

FILE = "model.lossless.safetensors"
_CPU = torch.device("cpu")


def load(path: Path, dtype: str = "auto") -> LoadedModel:
    return load_model(str(path), dtype=dtype, device=_CPU, kernels=TorchKernels())


def make(source: Path, out: Path, *, lossless: bool = True) -> Conversion:
    return convert(open_checkpoint(source), out, lossless=lossless)


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    return {
        name: (
            tensor.dtype,
            tensor.shape,
            tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy().tobytes(),
        )
        for name, tensor in tensors.items()
    }


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of tests have several chunks, the last one of another size."""
    monkeypatch.setattr(lossless_writer, "CHUNK", 1000)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """Tensors of many dtypes and shapes; bfloat16 has every bit pattern, and random ones."""
    tensors = {
        "all": torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).short().view(torch.bfloat16).view(256, 256),
        "random": torch.randn(37, 5, 11, generator=torch.Generator().manual_seed(1)).bfloat16(),
        "one": torch.tensor(1.5, dtype=torch.bfloat16),
        "none": torch.empty(0, 7, dtype=torch.bfloat16),
        "odd": torch.arange(5, dtype=torch.uint8),
        "scale": torch.randn(3),
        "index": torch.arange(3),
        "fp8": torch.randn(3, 3).to(torch.float8_e4m3fn),
    }
    path = tmp_path / "plain"
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text("{}")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool.jinja").write_text("x")
    return path


@settings(max_examples=30, deadline=None)
@given(st.binary(min_size=2, max_size=400))
def test_any_bits_come_back(content: bytes) -> None:
    words = np.frombuffer(content[: len(content) // 2 * 2], "<u2")
    rest, stream, checksum = encode(words)
    assert decode(rest, np.frombuffer(stream, np.uint8), checksum).tolist() == words.tolist()


def test_a_chunk_is_a_few_lines_of_any_language() -> None:
    """The layout, decoded independently: the mantissa above the sign in one byte, the exponent in a deflate stream."""
    rest, stream, _ = encode(torch.tensor([1.5, -2.25, 0.0, -0.0]).bfloat16().view(torch.int16).numpy().view(np.uint16))
    numbers = [
        (-1) ** (byte & 1) * (1 + (byte >> 1) / 128) * 2.0 ** (exponent - 127)
        for byte, exponent in zip(rest.tolist(), zlib.decompress(stream, -15), strict=True)
    ]
    assert numbers[:2] == [1.5, -2.25]
    assert [round(number, 30) for number in numbers[2:]] == [0, 0]


def test_a_stream_that_grows_without_end_is_refused() -> None:
    _, stream, checksum = encode(np.zeros(1 << 16, np.uint16))
    with pytest.raises(DamagedChunkError, match="another number of exponents"):
        decode(np.zeros(100, np.uint8), np.frombuffer(stream, np.uint8), checksum)


@pytest.mark.usefixtures("small_chunks")
def test_there_and_back_again(plain: Path, tmp_path: Path) -> None:
    there = make(plain, tmp_path / "coded")
    assert (there.num_coded, there.num_tensors) == (4, 8)
    back = make(tmp_path / "coded", tmp_path / "back", lossless=False)
    assert back.num_coded == 0
    assert bits(load_file(tmp_path / "back" / "model.safetensors")) == bits(load_file(plain / "model.safetensors"))
    assert (tmp_path / "coded" / "additional_chat_templates" / "tool.jinja").read_text() == "x"
    found = sorted(path.name for path in tmp_path.joinpath("coded").iterdir())
    assert found == ["additional_chat_templates", "config.json", FILE]


@pytest.mark.usefixtures("small_chunks")
def test_parts_are_read_as_of_the_plain_file(plain: Path, tmp_path: Path) -> None:
    make(plain, tmp_path / "coded")
    coded, reference = open_checkpoint(tmp_path / "coded"), open_checkpoint(plain)
    for name in ("all", "random", "scale"):
        outline = coded.outline(name)
        views: list[Callable[[torch.Tensor], torch.Tensor]] = [
            lambda t: t[2:3],
            lambda t: t[1:3:2],
            lambda t: t.transpose(0, -1),
            lambda t: t[..., 1:3],
        ]
        for view in views:
            found, wanted = coded.read(name, view(outline)), reference.read(name, view(reference.outline(name)))
            assert bits({name: found}) == bits({name: wanted})


def test_two_thirds_of_the_bytes(tmp_path: Path) -> None:
    """The entropy of a normal distribution's exponents is 2.55 bits, so 65.9 % is the bound."""
    weights = (torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    (tmp_path / "plain").mkdir()
    save_file({"w": weights}, tmp_path / "plain" / "model.safetensors")
    done = make(tmp_path / "plain", tmp_path / "coded")
    assert 0.655 < done.bytes_after / done.bytes_before < 0.67


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_model_loads_to_the_same_bits_and_fingerprint(dtype: str, tmp_path: Path) -> None:
    """In shards, with experts, tied or not, and as floats of another width."""
    source = save_tiny_qwen3_moe(tmp_path / "plain", dtype="bfloat16")
    tensors = load_file(source / "model.safetensors")
    names = sorted(tensors)
    shards = {f"model-0000{i}-of-00002.safetensors": names[i - 1 :: 2] for i in (1, 2)}
    (source / "model.safetensors").unlink()
    for shard, contents in shards.items():
        save_file({name: tensors[name] for name in contents}, source / shard)
    weight_map = {name: shard for shard, contents in shards.items() for name in contents}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    make(source, tmp_path / "coded")
    assert len(list((tmp_path / "coded").glob("model-*.lossless.safetensors"))) == 2
    wanted, found = load(source, dtype), load(tmp_path / "coded", dtype)
    assert found.spec == wanted.spec
    assert found.spec.fingerprint
    assert bits(tensors_of(found.decoder)) == bits(tensors_of(wanted.decoder))


def test_what_was_written_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_tiny_llama(tmp_path / "plain", dtype="bfloat16")
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    weight_map = {name: f"model-{i}.safetensors" for i, name in enumerate(tensors)}
    for name, file in weight_map.items():
        save_file({name: tensors[name]}, source / file)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    whole = OutputDirectory.write
    written: list[str] = []

    def write_three(self: OutputDirectory, name: str, write: object) -> None:
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(name)
        whole(self, name, write)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(OutputDirectory, "write", write_three)
        with pytest.raises(KeyboardInterrupt):
            make(source, tmp_path / "coded")
    assert not (tmp_path / "coded").exists()
    partial = tmp_path / "coded.partial"
    inodes = {name: (partial / name).stat().st_ino for name in written}
    with pytest.raises(ConfigurationError, match=r"coded\.partial is of a run with other settings"):
        make(source, tmp_path / "coded", lossless=False)
    make(source, tmp_path / "coded")
    assert {name: (tmp_path / "coded" / name).stat().st_ino for name in written} == inodes
    assert load(tmp_path / "coded").spec.fingerprint == load(source).spec.fingerprint
    assert not partial.exists()


class TestDamage:
    @pytest.fixture
    def coded(self, plain: Path, tmp_path: Path, small_chunks: None) -> Path:
        make(plain, tmp_path / "coded")
        return tmp_path / "coded"

    @pytest.mark.parametrize("part", lossless_file.PARTS)
    def test_a_flipped_bit_anywhere_in_a_tensor(self, part: str, coded: Path) -> None:
        path = coded / FILE
        content = bytearray(path.read_bytes())
        header = int.from_bytes(content[:8], "little")
        begin, end = json.loads(content[8 : 8 + header])[f"all{part}"]["data_offsets"]
        for position in (begin, (begin + end) // 2, end - 1):
            content[8 + header + position] ^= 4
            path.write_bytes(content)
            with pytest.raises(CorruptCheckpointError, match=r"model\.lossless\.safetensors.*\ball\b.*again"):
                open_checkpoint(coded).tensor("all")
            content[8 + header + position] ^= 4

    def test_a_truncated_file(self, coded: Path) -> None:
        content = (coded / FILE).read_bytes()
        (coded / FILE).write_bytes(content[:-1])
        with pytest.raises(CorruptCheckpointError, match="damaged or incomplete"):
            open_checkpoint(coded)

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"all.chunks": None}, "has all in parts and lacks all.chunks"),
            ({"all": torch.zeros(1)}, "has all in parts and has the same as floats"),
            ({"all.exponents": torch.zeros(9)}, "the parts of all are stored as"),
            ({"all.chunks": torch.zeros(3, 2, dtype=torch.uint32)}, r"all.chunks has shape \[3, 2\], 65536 numbers"),
            ({"all.exponents": torch.zeros(9, dtype=torch.uint8)}, r"all.exponents has shape \[9\], all.chunks calls"),
        ],
    )
    def test_parts_that_do_not_agree(self, changed: dict[str, torch.Tensor | None], message: str, coded: Path) -> None:
        tensors = load_file(coded / FILE) | changed
        kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        save_file(kept, coded / FILE, metadata=self._metadata(coded))
        with pytest.raises(CorruptCheckpointError, match=message):
            open_checkpoint(coded)

    @pytest.mark.parametrize(
        ("metadata", "error", "message"),
        [
            ({"tandem_lossless": "2"}, UnsupportedCheckpointError, "tandem_lossless is '2' in its metadata, '1' is"),
            ({"chunk": "0"}, CorruptCheckpointError, "chunk is '0' in its metadata, 1 to"),
            ({"chunk": "-1"}, CorruptCheckpointError, "chunk is '-1'"),
        ],
    )
    def test_metadata(self, metadata: dict[str, str], error: type[CheckpointError], message: str, coded: Path) -> None:
        save_file(load_file(coded / FILE), coded / FILE, metadata=self._metadata(coded) | metadata)
        with pytest.raises(error, match=message):
            open_checkpoint(coded)

    def _metadata(self, coded: Path) -> dict[str, str]:
        with safe_open(coded / FILE, framework="pt") as file:
            return dict(file.metadata())

    def test_a_damaged_source_leaves_nothing(self, coded: Path, tmp_path: Path) -> None:
        content = bytearray((coded / FILE).read_bytes())
        content[-1] ^= 255
        (coded / FILE).write_bytes(content)
        with pytest.raises(CorruptCheckpointError):
            make(coded, tmp_path / "back", lossless=False)
        assert not (tmp_path / "back").exists()
        assert [path.name for path in (tmp_path / "back.partial").iterdir()] == ["conversion_run.json"]


def test_nothing_to_gain_is_refused(tmp_path: Path) -> None:
    source = save_tiny_llama(tmp_path / "plain", dtype="float32")
    with pytest.raises(UnsupportedCheckpointError, match=r"no bfloat16 tensors, only float32.*leave it out"):
        make(source, tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


def test_a_name_for_parts_is_refused(plain: Path, tmp_path: Path) -> None:
    save_file({"w.chunks": torch.zeros(2).bfloat16()}, plain / "model.safetensors")
    with pytest.raises(UnsupportedCheckpointError, match=r"w\.chunks has a name for parts of tensors"):
        make(plain, tmp_path / "out")
    shutil.rmtree(tmp_path / "out.partial")
