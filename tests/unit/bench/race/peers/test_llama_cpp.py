"""llama.cpp: the file is coded once, and half a file is not taken for one."""

import sys
from pathlib import Path

import pytest

from bench.race.peers import llama_cpp
from bench.race.peers.llama_cpp import LlamaCpp
from bench.race.peers.process import cores
from bench.race.system import NotHere


def stubbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> LlamaCpp:
    """Its interpreter runs `script`, and the checkpoint need not be one."""
    system = LlamaCpp("Q4_0", tmp_path)
    python = system.environment.python
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(llama_cpp, "write_gguf", lambda checkpoint, target: target.touch())
    return system


def test_commands(tmp_path: Path) -> None:
    system = LlamaCpp("Q4_K_M", tmp_path)
    assert system.name == "llama-q4_k_m"
    assert system.command(Path("/m.gguf"), Path("/c"), 80)[1:] == [
        *("-m", "bench.race.peers.scripts.llama_server", "--model", "/m.gguf", "--tokenizer", "/c/tokenizer.json"),
        *("--name", "m", "--port", "80", "--threads", str(len(cores()))),
    ]
    assert system.command(Path("/m.gguf"), Path("/c"), 80)[0] != sys.executable


def test_a_checkpoint_is_coded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = stubbed(tmp_path, monkeypatch, f'touch "$4"; echo "$3 $4 $5" >> {tmp_path}/calls')
    first, again = system.coded(Path("/c/small")), system.coded(Path("/c/small"))
    assert first == again == tmp_path / "llama" / "small-q4_0.gguf"
    assert (tmp_path / "calls").read_text().split() == [
        *(str(tmp_path / "llama" / name) for name in ("small.gguf", "small-q4_0.partial")),
        "Q4_0",
    ]


def test_half_a_file_is_not_taken_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = stubbed(tmp_path, monkeypatch, 'touch "$4"; echo no memory; exit 1')
    for _ in range(2):
        with pytest.raises(NotHere, match="cannot code small"):
            system.coded(Path("/c/small"))
