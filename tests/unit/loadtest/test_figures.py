"""Pictures are drawn from the JSON, in every state that a result can have."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.core.errors import ConfigurationError
from tandem.loadtest.figures import draw
from tandem.loadtest.result import LoadResult
from tests.unit.loadtest.outcomes import FAILED, REFUSED, outcome, result, unanswered


def drawn(found: LoadResult, directory: Path, kind: str = "svg") -> dict[str, str]:
    paths = draw(json.loads(json.dumps(found.as_json())), directory, kind)
    assert sorted(directory.iterdir()) == sorted(paths)
    return {path.stem: path.read_text(errors="replace") for path in paths}


def test_each_picture_says_what_it_shows(tmp_path: Path) -> None:
    outcomes = [outcome(index / 10, ttft_s=0.01 * (index + 1)) for index in range(40)]
    found = drawn(result(*outcomes, unanswered(0.5, REFUSED), unanswered(1.5, FAILED)), tmp_path)
    assert sorted(found) == ["latency", "over-time", "throughput"]
    for words in ("time to first token", "time per output token", "whole answer", "from due time", "from sending"):
        assert f">{words}<" in found["latency"]
    for words in ("p50", "p99", "objective"):
        assert f">{words}<" in found["over-time"]
    for words in ("output tokens a second", "workers that are ready", "answered", "refused", "failed", "decode"):
        assert f">{words}<" in found["throughput"]
    assert ">prefill<" not in found["throughput"]


@pytest.mark.parametrize("outcomes", [(), (outcome(0.0),), (outcome(0.0, tokens=1),), (unanswered(0.0, REFUSED),)])
def test_little_to_draw_is_no_error(outcomes: tuple[()], tmp_path: Path) -> None:
    drawn(result(*outcomes, pools=[]), tmp_path)


def test_the_same_result_is_the_same_picture(tmp_path: Path) -> None:
    found = result(outcome(0.0), outcome(1.0))
    assert drawn(found, tmp_path / "a") == drawn(found, tmp_path / "b")


def test_as_png(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    drawn(result(outcome(0.0)), tmp_path / "x", "png")
    assert (tmp_path / "x" / "latency.png").read_bytes().startswith(b"\x89PNG")


def test_a_directory_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="name a directory"):
        draw(result(outcome(0.0)).as_json(), tmp_path / "file" / "x", "svg")


def test_measuring_needs_neither_matplotlib_nor_torch() -> None:
    heavy = ("torch", "numpy", "matplotlib", "grpc", "fastapi")
    code = f"import sys, tandem.cli.load; sys.exit(bool([name for name in {heavy} if name in sys.modules]))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
