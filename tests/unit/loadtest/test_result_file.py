"""A result is written as JSON that people can read too, and where it cannot be, that is told before the test."""

import json
from pathlib import Path

import pytest

from tandem.core.errors import ConfigurationError
from tandem.loadtest.result_file import check_writable, write_json
from tests.unit.loadtest.outcomes import outcome, result


def test_it_reads_back(tmp_path: Path) -> None:
    value = result(outcome(0.0), outcome(1.0)).as_json()
    write_json(value, tmp_path / "r.json")
    text = (tmp_path / "r.json").read_text()
    assert json.loads(text) == value
    assert any(line.startswith(' {"at_s": 0.0') for line in text.splitlines())


def test_to_standard_output_it_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    value = result(outcome(0.0)).as_json()
    write_json(value, None)
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out) == value


def test_checking_changes_nothing(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "r.json")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "old.json").write_text("kept")
    check_writable(tmp_path / "old.json")
    assert (tmp_path / "old.json").read_text() == "kept"


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "r.json", tmp_path):
        with pytest.raises(ConfigurationError, match="name a file that can be written"):
            check_writable(path)
        with pytest.raises(ConfigurationError, match="name a file that can be written"):
            write_json({}, path)
