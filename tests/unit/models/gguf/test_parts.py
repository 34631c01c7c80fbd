"""A model in parts, as the `gguf` package writes them, is the model in one file; parts that do not belong together are
refused by name.
"""

import shutil
from functools import partial
from pathlib import Path

import pytest

from tandem.core.errors import CorruptCheckpointError
from tandem.models.gguf.convert import converted
from tandem.models.gguf.file import GgufFile
from tandem.models.gguf.parts import part_paths, whole_name
from tests.helpers.checkpoints import Builder, save_tiny_llama, save_tiny_qwen3_moe
from tests.helpers.gguf_files import write_gguf


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return save_tiny_llama(tmp_path / "plain")


@pytest.fixture
def parts(plain: Path, tmp_path: Path) -> list[Path]:
    return part_paths(write_gguf(plain, tmp_path / "tiny.gguf", tensors_of_a_part=9))


def refusal(path: Path) -> str:
    with pytest.raises(CorruptCheckpointError) as caught:
        converted(path, path.parent / "cache")
    return str(caught.value)


def test_names() -> None:
    middle = Path("models/Big-Q4_K_M-00002-of-00003.gguf")
    assert part_paths(middle) == [Path(f"models/Big-Q4_K_M-0000{number}-of-00003.gguf") for number in (1, 2, 3)]
    assert whole_name(middle) == "Big-Q4_K_M"
    for name in ("Big-Q4_K_M.gguf", "Big-00000-of-00000.gguf", "Big-1-of-3.gguf"):
        assert part_paths(Path(name)) == [Path(name)]
        assert whole_name(Path(name)) == name.removesuffix(".gguf")


@pytest.mark.parametrize("build", [save_tiny_llama, partial(save_tiny_qwen3_moe, mlp_only_layers=[])])
def test_all_files_of_a_model_are_that_of_one(tmp_path: Path, build: Builder) -> None:
    checkpoint = build(tmp_path / "checkpoint")
    whole = write_gguf(checkpoint, tmp_path / "whole.gguf", type_name="Q4_1")
    parts = part_paths(write_gguf(checkpoint, tmp_path / "tiny.gguf", type_name="Q4_1", tensors_of_a_part=4))
    assert len(parts) > 2
    expected = converted(whole, tmp_path / "cache")
    for asked in (parts[0], parts[-1]):
        made = converted(asked, tmp_path / "cache")
        assert made != expected
        for path in expected.iterdir():
            assert (made / path.name).read_bytes() == path.read_bytes(), path.name


def test_the_same_first_part_beside_other_ones_is_another_model(parts: list[Path], plain: Path, tmp_path: Path) -> None:
    before = converted(parts[0], tmp_path / "cache")
    other = save_tiny_llama(tmp_path / "other", seed=1)
    shutil.copy(part_paths(write_gguf(other, tmp_path / "others.gguf", tensors_of_a_part=9))[1], parts[1])
    assert converted(parts[0], tmp_path / "cache") != before


def test_a_missing_part_is_named(parts: list[Path]) -> None:
    parts[1].unlink()
    message = refusal(parts[0])
    assert str(parts[1]) in message
    assert message.endswith("a model in parts needs all of them in one directory")


def test_a_damaged_part_is_named(parts: list[Path]) -> None:
    parts[1].write_bytes(parts[1].read_bytes()[:-1])
    assert refusal(parts[0]).startswith(f"{parts[1]}: tensor ")


def test_parts_that_changed_places(parts: list[Path], tmp_path: Path) -> None:
    parts[0].rename(tmp_path / "kept")
    parts[1].rename(parts[0])
    (tmp_path / "kept").rename(parts[1])
    assert "and split.no=1 (from 0), and by its name it is part 1 of" in refusal(parts[0])


def test_a_part_under_a_name_of_its_own(parts: list[Path], tmp_path: Path) -> None:
    alone = parts[0].rename(tmp_path / "model.gguf")
    assert "by its name it is part 1 of 1; download all parts again and keep their names" in refusal(alone)


def test_a_whole_file_that_is_named_as_a_part(plain: Path, tmp_path: Path) -> None:
    path = write_gguf(plain, tmp_path / "tiny-00001-of-00001.gguf")
    with GgufFile(path) as file:
        assert file.tensors
    path = path.rename(tmp_path / "tiny-00001-of-00002.gguf")
    shutil.copy(path, tmp_path / "tiny-00002-of-00002.gguf")
    assert "split.count=1 and split.no=0" in refusal(path)


def test_a_part_twice(parts: list[Path]) -> None:
    """The second says to be another part, and has the tensors of the first."""
    content = parts[0].read_bytes()
    key = b"split.no"
    at = content.index(key) + len(key) + 4
    assert content[at : at + 2] == b"\0\0"
    parts[1].write_bytes(content[:at] + b"\1\0" + content[at + 2 :])
    assert "is in another part too; download all parts again" in refusal(parts[0])


def test_fewer_tensors_than_the_model_has(parts: list[Path]) -> None:
    content = parts[0].read_bytes()
    key = b"split.tensors.count"
    at = content.index(key) + len(key) + 4
    number = int.from_bytes(content[at : at + 4], "little")
    parts[0].write_bytes(content[:at] + (number + 1).to_bytes(4, "little") + content[at + 4 :])
    assert f"split.tensors.count={number + 1}, and its {len(parts)} parts have {number} tensors" in refusal(parts[0])
