"""The build cache: complete files only, one per compiler and flags, and errors that say what to do."""

from pathlib import Path

import pytest

from tandem.core.errors import ConfigurationError
from tandem.kernels.native.build import build

FAKE_COMPILER = """#!/bin/sh
[ "$1" = --version ] && echo "fake {version}" && exit 0
echo run >> {log}
while [ "$1" != -o ]; do shift; done
[ -n "{fail}" ] && echo "{fail}" >&2 && exit 1
echo compiled > "$2"
"""


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def use_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: Path, *, version: str = "1", fail: str = ""
) -> None:
    script = tmp_path / "compiler"
    script.write_text(FAKE_COMPILER.format(version=version, log=log, fail=fail))
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))


def test_second_build_compiles_nothing(tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_compiler(monkeypatch, tmp_path, runs)
    first = build(tmp_path / "cache")
    assert first.read_text() == "compiled\n"
    assert build(tmp_path / "cache") == first
    assert runs.read_text() == "run\n"
    build(tmp_path / "cache", force=True)
    assert runs.read_text() == "run\nrun\n"


def test_another_compiler_version_gets_another_file(
    tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_compiler(monkeypatch, tmp_path, runs)
    first = build(tmp_path / "cache")
    use_compiler(monkeypatch, tmp_path, runs, version="2")
    assert build(tmp_path / "cache") != first


def test_cache_directory_comes_from_the_environment(
    tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_compiler(monkeypatch, tmp_path, runs)
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert build().parent == tmp_path / "elsewhere"


def test_failed_compilation_leaves_nothing_and_quotes_the_compiler(
    tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_compiler(monkeypatch, tmp_path, runs, fail="error: no such intrinsic")
    with pytest.raises(ConfigurationError, match="no such intrinsic"):
        build(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_unwritable_cache_directory_names_the_setting(
    tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_compiler(monkeypatch, tmp_path, runs)
    occupied = tmp_path / "a-file"
    occupied.touch()
    with pytest.raises(ConfigurationError, match="TANDEM_CACHE_DIR"):
        build(occupied)
