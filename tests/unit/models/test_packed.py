"""A model's matrices packed in a file: the same answers, written once, and done without where they cannot be had."""

import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tandem.architecture.model import EMBEDDING, HEAD
from tandem.compute.native.bindings import NativeKernels
from tandem.compute.ops import Kernels, Matrix
from tandem.compute.torch.kernels import TorchKernels
from tandem.models import file_lock, packed
from tandem.models.loader import LoadedModel, load_model
from tandem.models.packed_files import make_room
from tests.helpers import checkpoints
from tests.helpers.native_kernels import load_or_skip
from tests.helpers.parameters import packed_names

CPU = torch.device("cpu")
NAMES = (("first", 13), ("second", 14), ("third", 15))
SIZES: dict[str, Any] = {"vocab_size": 208, "hidden_size": 64, "intermediate_size": 96}


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    return load_or_skip()


@pytest.fixture(autouse=True)
def _tiny_models_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "LEAST_BYTES", 0)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return checkpoints.save_tiny_qwen3(tmp_path / "model", **SIZES)


def loaded(path: Path, kernels: Kernels, directory: Path | None) -> LoadedModel:
    return load_model(str(path), device=CPU, kernels=kernels, packed_dir=directory)


def answers(model: LoadedModel) -> torch.Tensor:
    """Logits of hidden states, and all layers' matrices by the MLP of each."""
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    for layer in model.decoder._layers:
        assert layer._feed_forward is not None
        hidden = hidden + layer._feed_forward(hidden)
    return model.decoder.logits(hidden)


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def test_another_device_has_weights_of_its_own(kernels: NativeKernels, checkpoint: Path, tmp_path: Path) -> None:
    """Regression: weights that a file holds were taken for those of a GPU; what is mapped is the CPU's memory."""
    model = load_model(str(checkpoint), device=torch.device("meta"), kernels=kernels, packed_dir=tmp_path / "packed")
    assert not files(tmp_path / "packed")
    matrices = [weight.matrix for weight in model.decoder.parameters.weights.values()]
    assert {matrix.tensor.device.type for matrix in matrices if isinstance(matrix, Matrix)} == {"meta"}


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_same_bits_from_a_file_that_is_written_once(kernels: NativeKernels, tmp_path: Path, is_tied: bool) -> None:
    path = checkpoints.save_tiny_qwen3(tmp_path / "model", **SIZES, tie_word_embeddings=is_tied)
    plain, first = loaded(path, kernels, None), loaded(path, kernels, tmp_path / "packed")
    (file,) = files(tmp_path / "packed")
    written = file.stat().st_ino
    again = loaded(path, kernels, tmp_path / "packed")
    assert torch.equal(answers(first), answers(plain))
    assert torch.equal(answers(again), answers(plain))
    assert file.stat().st_ino == written
    assert packed_names(again.decoder) == {name for name in plain.decoder.parameters.weights if "proj" in name} | {HEAD}
    assert torch.equal(again.decoder.parameters.tensors[EMBEDDING], plain.decoder.parameters.tensors[EMBEDDING])
    assert again.spec == plain.spec


def test_packing_is_told_before_and_after_and_reading_is_not(
    kernels: NativeKernels, checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="tandem.models.packed"):
        loaded(checkpoint, kernels, tmp_path / "packed")
        (file,) = files(tmp_path / "packed")
        loaded(checkpoint, kernels, tmp_path / "packed")
    before, after = (record.message for record in caplog.records if record.name == "tandem.models.packed")
    assert re.fullmatch(rf"packing \d+ MiB of weights into {re.escape(str(file))}, once", before)
    assert re.fullmatch(r"packed \d+ MiB in \d+\.\d s", after)


def test_other_weights_get_another_file(kernels: NativeKernels, tmp_path: Path, checkpoint: Path) -> None:
    loaded(checkpoint, kernels, tmp_path / "packed")
    shutil.rmtree(checkpoint)
    other = checkpoints.save_tiny_qwen3(checkpoint, seed=1, **SIZES)
    assert torch.equal(answers(loaded(other, kernels, tmp_path / "packed")), answers(loaded(other, kernels, None)))
    assert len(files(tmp_path / "packed")) == 2


def test_weights_that_were_edited_where_no_sample_lies_get_another_file(
    kernels: NativeKernels, tmp_path: Path, checkpoint: Path
) -> None:
    loaded(checkpoint, kernels, tmp_path / "packed")
    os.utime(checkpoint / "model.safetensors", ns=(1, 1))
    loaded(checkpoint, kernels, tmp_path / "packed")
    assert len(files(tmp_path / "packed")) == 2


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def of_other_shapes(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content.replace(b"[96, 64]", b"[64, 96]"))


@pytest.mark.parametrize("damage", [cut, empty, of_other_shapes])
def test_a_damaged_file_is_made_anew(
    kernels: NativeKernels, tmp_path: Path, checkpoint: Path, damage: Callable[[Path], None]
) -> None:
    loaded(checkpoint, kernels, tmp_path / "packed")
    (file,) = files(tmp_path / "packed")
    whole = file.read_bytes()
    damage(file)
    assert torch.equal(
        answers(loaded(checkpoint, kernels, tmp_path / "packed")), answers(loaded(checkpoint, kernels, None))
    )
    assert file.read_bytes() == whole


def test_a_full_disk_is_said_and_done_without(
    kernels: NativeKernels,
    tmp_path: Path,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=1 << 30, free=51 << 20))
    with caplog.at_level(logging.WARNING):
        model = loaded(checkpoint, kernels, tmp_path / "packed")
    assert "less than 5 % of its disk free, 1 MiB more must be free" in caplog.text
    assert torch.equal(answers(model), answers(loaded(checkpoint, kernels, None)))
    assert not files(tmp_path / "packed")


def test_a_write_that_fails_leaves_nothing(
    kernels: NativeKernels, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    model = loaded(checkpoint, kernels, tmp_path / "packed")
    assert torch.equal(answers(model), answers(loaded(checkpoint, kernels, None)))
    assert [path.suffix for path in (tmp_path / "packed").iterdir()] == [".lock"]


def test_a_place_that_cannot_be_written_is_done_without(
    kernels: NativeKernels, tmp_path: Path, checkpoint: Path
) -> None:
    (tmp_path / "file").write_text("")
    model = loaded(checkpoint, kernels, tmp_path / "file" / "packed")
    assert torch.equal(answers(model), answers(loaded(checkpoint, kernels, None)))


@pytest.mark.parametrize("options", [{"vocab_size": 199}, {"intermediate_size": 90}])
def test_what_cannot_be_packed_stays_as_it_is(kernels: NativeKernels, tmp_path: Path, options: dict[str, int]) -> None:
    """A head alone, or with one layer's matrix all of them."""
    path = checkpoints.save_tiny_qwen3(tmp_path / "model", **SIZES | options)
    model = loaded(path, kernels, tmp_path / "packed")
    names = packed_names(model.decoder)
    assert HEAD not in names
    assert bool(names) == ("vocab_size" in options)
    assert torch.equal(answers(model), answers(loaded(path, kernels, None)))


def test_kernels_that_do_not_pack_write_nothing(tmp_path: Path, checkpoint: Path) -> None:
    loaded(checkpoint, TorchKernels(), tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_small_models_are_not_worth_a_file(
    kernels: NativeKernels, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "LEAST_BYTES", 8 << 20)
    loaded(checkpoint, kernels, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_a_new_file_ends_what_nobody_loads_any_more(kernels: NativeKernels, tmp_path: Path) -> None:
    paths = [checkpoints.save_tiny_qwen3(tmp_path / name, **SIZES | {"vocab_size": 16 * size}) for name, size in NAMES]
    directory = tmp_path / "packed"
    known: list[Path] = []
    for path in paths[:2]:
        loaded(path, kernels, directory)
        known += [file for file in files(directory) if file not in known]
    old, loaded_again = known
    left = directory / "packing-by-one-who-was-killed"
    left.write_text("half")
    for file in (old, loaded_again, left):
        os.utime(file, (0, 0))
    mapped = loaded(paths[1], kernels, directory)
    expected = answers(mapped)
    loaded(paths[2], kernels, directory)
    assert not old.exists()
    assert not left.exists()
    assert loaded_again in files(directory)
    assert len(files(directory)) == 2
    loaded_again.unlink()
    assert torch.equal(answers(mapped), expected)


def test_what_was_made_of_a_checkpoint_that_is_gone_is_kept_for_a_day(kernels: NativeKernels, tmp_path: Path) -> None:
    paths = [checkpoints.save_tiny_qwen3(tmp_path / name, **SIZES | {"vocab_size": 16 * size}) for name, size in NAMES]
    directory = tmp_path / "packed"
    loaded(paths[0], kernels, directory)
    (gone,) = files(directory)
    loaded(paths[1], kernels, directory)
    (there,) = set(files(directory)) - {gone}
    shutil.rmtree(paths[0])
    loaded(paths[2], kernels, directory)
    assert gone in files(directory)
    for file in (gone, there):
        os.utime(file, (time.time() - 2 * 86400,) * 2)
    os.utime(paths[2] / "model.safetensors", ns=(1, 1))
    loaded(paths[2], kernels, directory)
    assert gone not in files(directory)
    assert there in files(directory)


def test_a_disk_that_is_nearly_full_ends_first_what_is_abandoned_then_what_is_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: files were kept for 30 days until nothing was free, so that other programs could not write."""
    origin = tmp_path / "model"
    origin.touch()
    for name, checkpoint, age_h in (
        ("abandoned", tmp_path / "gone", 1),
        ("older", origin, 50),
        ("idle", origin, 25),
        ("used", origin, 23),
    ):
        save_file({"a": torch.zeros(1)}, tmp_path / f"{name}.safetensors", {"checkpoint": str(checkpoint)})
        os.utime(tmp_path / f"{name}.safetensors", (time.time() - age_h * 3600,) * 2)

    def left_with(free_mib: int) -> set[str]:
        """Files that a disk of 1,000 MiB keeps, if each takes one, when one of 10 MiB is to be written."""
        num_files = len(files(tmp_path))
        monkeypatch.setattr(
            shutil,
            "disk_usage",
            lambda _: SimpleNamespace(total=1000 << 20, free=free_mib + num_files - len(files(tmp_path)) << 20),
        )
        make_room(tmp_path, 10 << 20)
        return {file.stem for file in files(tmp_path)}

    assert left_with(60) == {"abandoned", "older", "idle", "used"}
    assert left_with(59) == {"older", "idle", "used"}
    assert left_with(59) == {"idle", "used"}
    with pytest.raises(OSError, match="1 MiB more must be free"):
        left_with(58)
    assert {file.stem for file in files(tmp_path)} == {"used"}


def test_what_was_made_of_a_checkpoint_that_cannot_be_looked_for_is_kept(
    kernels: NativeKernels, tmp_path: Path, checkpoint: Path
) -> None:
    directory = tmp_path / "packed"
    directory.mkdir()
    hidden = directory / "of-another-user.safetensors"
    save_file({"a": torch.zeros(1)}, hidden, {"checkpoint": 5000 * "x"})  # NOTE: too long to be asked for, even by root
    os.utime(hidden, (time.time() - 2 * 86400,) * 2)
    model = loaded(checkpoint, kernels, directory)
    assert hidden in files(directory)
    assert packed_names(model.decoder)


def test_one_who_packs_for_ever_is_not_waited_for(
    kernels: NativeKernels,
    tmp_path: Path,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    loaded(checkpoint, kernels, tmp_path / "packed")
    (file,) = files(tmp_path / "packed")
    monkeypatch.setattr(file_lock, "_PATIENCE_S", 0.1)
    with file_lock.locked(file.with_suffix(".lock")), caplog.at_level(logging.WARNING):
        model = loaded(checkpoint, kernels, tmp_path / "packed")
    assert "another process has held" in caplog.text
    assert not packed_names(model.decoder)
    assert torch.equal(answers(model), answers(loaded(checkpoint, kernels, None)))


SCRIPT = """
import sys, torch
from pathlib import Path
from tandem.compute.native.bindings import load
from tandem.models import file_lock, packed
from tandem.models.loader import load_model
packed.LEAST_BYTES = 0
model = load_model(sys.argv[1], device=torch.device("cpu"), kernels=load(), packed_dir=Path(sys.argv[2]))
print(model.decoder.parameters.weights["lm_head.weight"].matrix.order.name)
"""


def test_processes_that_start_together_write_it_once(kernels: NativeKernels, tmp_path: Path, checkpoint: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(checkpoint), str(tmp_path / "packed")]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    told = [process.communicate(timeout=120) for process in started]
    assert [out.strip() for out, _ in told] == ["STRIPS"] * 2, told
    assert sum("once" in err for _, err in told) <= 1
    assert len(files(tmp_path / "packed")) == 1
