"""Damaged files of weights and configurations: each is a model, or is refused by the name of its file. No damage makes
another error, nor a large allocation; what hangs, the tests' time limit ends.
"""

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.compute.torch.kernels import TorchKernels
from tandem.core.errors import CheckpointError
from tandem.models.checkpoint import open_checkpoint
from tandem.models.convert import convert
from tandem.models.gguf.convert import converted
from tandem.models.gguf.file import GgufFile
from tandem.models.loader import load_model
from tandem.text.tokenizer import Tokenizer
from tests.helpers.checkpoints import save_tiny_llama, save_tiny_qwen3_moe
from tests.helpers.damage import damaged, damaged_object, little_memory
from tests.helpers.gguf_files import write_gguf
from tests.helpers.published_formats import FORMATS, save_published
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer

NUM_FILES = 25  # of a seed
MORE_BYTES = 1 << 30
SIZES: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64}
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 60))]


def load_or_refuse(path: Path) -> None:
    """It is a model, or is refused by its name."""
    try:
        with little_memory(MORE_BYTES):
            directory = converted(path, path.parent / "cache") if path.suffix == ".gguf" else path
            load_model(str(directory), dtype="float32", device=torch.device("cpu"), kernels=TorchKernels())
            if (directory / "tokenizer.json").is_file():
                Tokenizer.load(directory)
    except CheckpointError as error:
        if str(path.parent) not in str(error):
            raise AssertionError("which file is not said") from error


def saved(path: Path, **options: Any) -> Path:
    return save_tiny_llama(path, **SIZES | {"vocab_size": NUM_TOKENS} | options)


@pytest.fixture(scope="module")
def gguf_content(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, int]:
    """A file, and where its tensors begin."""
    path = tmp_path_factory.mktemp("gguf")
    file = write_gguf(
        save_tiny_qwen3_moe(path / "plain", **SIZES, mlp_only_layers=[]), path / "a.gguf", type_name="Q8_0"
    )
    with GgufFile(file) as opened:
        start = min(entry.offset for entry in opened.tensors.values())
    return file.read_bytes(), start


@pytest.mark.parametrize("seed", SEEDS)
def test_gguf(tmp_path: Path, gguf_content: tuple[bytes, int], seed: int) -> None:
    content, start = gguf_content
    for index in range(NUM_FILES):
        path = tmp_path / f"{index}.gguf"
        path.write_bytes(damaged(random.Random(f"{seed} {index}"), content, start + 64))
        told(path, seed, index)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(saved(tmp_path_factory.mktemp("plain") / "tiny"))


@pytest.fixture(scope="module")
def coded(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("coded")
    save_published(plain, FORMATS["compressed int4 groups"], path / "coded", path / "decoded")
    return path / "coded"


def copied(source: Path, target: Path) -> Path:
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).symlink_to(file)
    return target


def replaced(path: Path, name: str, content: bytes) -> None:
    (path / name).unlink()
    (path / name).write_bytes(content)


def told(path: Path, seed: int, index: int) -> None:
    """NOTE: an error from elsewhere says neither the seed nor the file."""
    try:
        load_or_refuse(path)
    except BaseException as error:
        error.add_note(f"seed {seed}, file {index}")
        raise


@pytest.mark.parametrize("seed", SEEDS)
def test_safetensors(tmp_path: Path, plain: Path, seed: int) -> None:
    content = (plain / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    for index in range(NUM_FILES):
        rng, path = random.Random(f"{seed} {index}"), copied(plain, tmp_path / str(index))
        if rng.random() < 0.5:
            found = damaged(rng, content, 8 + size)
        else:
            changed = damaged_object(rng, header).encode()
            found = struct.pack("<Q", len(changed)) + changed + content[8 + size :]
        replaced(path, "model.safetensors", found)
        told(path, seed, index)


@pytest.mark.parametrize("seed", SEEDS)
def test_configurations(tmp_path: Path, plain: Path, coded: Path, seed: int) -> None:
    """Of floats and of codes, of which half the numbers are described in the configuration."""
    for index in range(NUM_FILES):
        rng = random.Random(f"{seed} {index}")
        source = rng.choice((plain, coded))
        path, config = copied(source, tmp_path / str(index)), (source / "config.json").read_bytes()
        is_object = rng.random() < 0.7
        found = damaged_object(rng, json.loads(config)).encode() if is_object else damaged(rng, config, len(config))
        replaced(path, "config.json", found)
        told(path, seed, index)


@pytest.mark.parametrize("seed", SEEDS)
def test_codes_and_scales(tmp_path: Path, coded: Path, seed: int) -> None:
    content = (coded / "model.safetensors").read_bytes()
    start = 8 + struct.unpack("<Q", content[:8])[0]
    for index in range(NUM_FILES):
        rng, path = random.Random(f"{seed} {index}"), copied(coded, tmp_path / str(index))
        numbers = damaged(rng, content[start:], len(content) - start)[: len(content) - start]
        replaced(path, "model.safetensors", content[:start] + numbers.ljust(len(content) - start, b"\xff"))
        told(path, seed, index)


@pytest.mark.parametrize("seed", SEEDS)
def test_lossless(tmp_path: Path, plain: Path, lossless: Path, seed: int) -> None:
    (file,) = (path for path in lossless.iterdir() if path.name.startswith("model"))
    content = file.read_bytes()
    for index in range(NUM_FILES):
        rng, path = random.Random(f"{seed} {index}"), copied(lossless, tmp_path / str(index))
        replaced(path, file.name, damaged(rng, content, min(len(content), 4096)))
        told(path, seed, index)


@pytest.fixture(scope="module")
def lossless(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = write_byte_tokenizer(saved(tmp_path_factory.mktemp("bfloat16") / "tiny", dtype="bfloat16"))
    target = tmp_path_factory.mktemp("lossless") / "tiny"
    convert(open_checkpoint(source), target, lossless=True)
    return target
