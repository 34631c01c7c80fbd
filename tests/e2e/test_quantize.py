"""`tandem quantize` as a user runs it: a real process, killed and given again, and what it answers to bad input."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tandem.cli.main import main
from tests.helpers import command_line
from tests.helpers.checkpoints import save_tiny_llama
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer

NUM_LAYERS = 8
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}  # NOTE: small tensors are fastest on one thread
SMALL = ["--sequence-length", "32", "--calibration-sequences", "8", "--evaluation-sequences", "2"]
INT4 = ["--format", "int4", "--group-size", "32"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    options: dict[str, Any] = {"vocab_size": NUM_TOKENS, "num_hidden_layers": NUM_LAYERS, "initializer_range": 0.1}
    return write_byte_tokenizer(save_tiny_llama(path, **options))


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "tandem.cli.main", "quantize", *map(str, arguments)]


def quantize(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return command_line.run("quantize", *arguments, env=ENVIRONMENT, timeout_s=200)


def test_a_run_that_was_killed_goes_on_to_the_same_files(checkpoint: Path, tmp_path: Path) -> None:
    flags = ["--model", str(checkpoint), *INT4, *SMALL]
    whole = quantize(*flags, "--out", tmp_path / "whole", "--json")
    assert whole.returncode == 0, whole.stderr
    killed = tmp_path / "killed"
    with subprocess.Popen(
        command(*flags, "--out", killed), stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("layer 2 of"):
                process.send_signal(signal.SIGKILL)
                break
        assert process.wait(60) == -signal.SIGKILL
    assert not killed.exists()
    layers = (tmp_path / "killed.partial").glob("model-layer-*.safetensors")
    written = {path.name: path.stat().st_ino for path in layers}
    assert 2 <= len(written) < NUM_LAYERS
    again = quantize(*flags, "--out", killed, "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout) == json.loads(whole.stdout)
    assert {name: (killed / name).stat().st_ino for name in written} == written, "no layer was computed again"
    found, wanted = ({path.name: path.read_bytes() for path in out.iterdir()} for out in (killed, tmp_path / "whole"))
    assert found == wanted


def test_the_report_is_printed(checkpoint: Path, tmp_path: Path) -> None:
    result = quantize("--model", checkpoint, "--format", "fp8", "--method", "rtn", "--out", tmp_path / "fp8", *SMALL)
    assert result.returncode == 0, result.stderr
    assert result.stdout == (tmp_path / "fp8" / "quantization_report.txt").read_text()
    assert result.stdout.startswith(f"{checkpoint.name}: fp8 by rtn, one scale for each output\n")
    assert result.stderr.splitlines()[-1] == f"layer {NUM_LAYERS} of {NUM_LAYERS}"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--format", "int3"], "--format='int3': Input should be 'int8', 'int4', 'fp8', 'mxfp4' or 'nvfp4'"),
        (["--format", "int4", "--group-size", "64"], "groups of 64 do not divide; give --group-size=32"),
        (
            ["--format", "int8", "--sequence-length", "4096"],
            "--sequence-length=4096: the model's sequences have",
        ),
        (["--format", "int8", "--calibrate", "/none.txt"], "--calibrate=/none.txt: "),
    ],
)
def test_bad_input_is_answered_with_the_value_and_the_remedy(
    flags: list[str], message: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", str(checkpoint), "--out", str(tmp_path / "out"), *flags]
    assert main(["quantize", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_full_directory_is_refused_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("")
    arguments = ["--model", str(tmp_path / "none"), "--format", "int8", "--out", str(tmp_path)]
    assert main(["quantize", *arguments]) == 2
    wanted = f"--out={tmp_path} exists and is not an empty directory; name another, or delete it"
    assert wanted in capsys.readouterr().err
