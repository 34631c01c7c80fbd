"""`tandem convert` from the command line: what it prints, and what it answers to bad input."""

import json
from pathlib import Path

import pytest

from tandem.cli.checks import check_model
from tandem.cli.main import main
from tests.helpers.checkpoints import save_tiny_llama
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer


def test_what_is_written_can_be_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_byte_tokenizer(save_tiny_llama(tmp_path / "in", dtype="bfloat16", vocab_size=NUM_TOKENS))
    out = tmp_path / "out"
    assert main(["convert", "--lossless", "--model", str(source), "--out", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["num_coded"] == said["num_tensors"]
    assert said["bytes_after"] == (out / "model.lossless.safetensors").stat().st_size
    check_model(out)
    assert main(["convert", "--model", str(out), "--out", str(tmp_path / "back")]) == 0
    assert "; 0 of " in capsys.readouterr().out


def test_a_full_directory_is_refused_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("")
    assert main(["convert", "--model", str(tmp_path / "none"), "--out", str(tmp_path)]) == 2
    wanted = f"--out={tmp_path} exists and is not an empty directory; name another, or delete it"
    assert wanted in capsys.readouterr().err
