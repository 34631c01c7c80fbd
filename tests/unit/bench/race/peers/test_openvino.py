"""OpenVINO: exported once, served from there; what is said when it cannot be exported."""

from pathlib import Path

import pytest

from bench.race.peers.openvino import OpenVino
from bench.race.peers.process import cores
from bench.race.system import KV_CACHE_GIB, NotHere


def test_commands(tmp_path: Path) -> None:
    system = OpenVino(build=tmp_path)
    assert system.command(Path("/m"), 80)[1:] == [
        *("-m", "bench.race.peers.scripts.openvino_server", "--model", "/m", "--name", "m", "--port", "80"),
        *("--threads", str(len(cores())), "--cache-gb", str(KV_CACHE_GIB)),
        *("--precision", "bf16", "--kv-precision", "u8"),
    ]
    exporting = system.export_command(Path("/c"), Path("/m"))
    assert exporting[0] == str(tmp_path / "venvs" / "openvino" / "bin" / "optimum-cli")
    assert " ".join(exporting[1:]) == (
        "export openvino --model /c --task text-generation-with-past --weight-format fp16 /m"
    )


def stub_exporter(system: OpenVino, script: str) -> None:
    exporter = system.environment.directory / "bin" / "optimum-cli"
    exporter.parent.mkdir(parents=True)
    exporter.write_text(f"#!/bin/sh\n{script}\n")
    exporter.chmod(0o755)


def test_a_checkpoint_is_exported_once(tmp_path: Path) -> None:
    system = OpenVino(build=tmp_path)
    stub_exporter(system, f'for last; do :; done; mkdir -p "$last"; echo x >> {tmp_path}/calls')
    first, again = system.exported(Path("/c/small")), system.exported(Path("/c/small"))
    assert first == again == tmp_path / "openvino" / "small"
    assert (tmp_path / "calls").read_text() == "x\n"


def test_half_an_export_is_not_taken_for_one(tmp_path: Path) -> None:
    system = OpenVino(build=tmp_path)
    stub_exporter(system, 'for last; do :; done; mkdir -p "$last"; echo no memory; exit 1')
    for _ in range(2):
        with pytest.raises(NotHere, match=r"cannot export small \(status 1\); its output ends: no memory"):
            system.exported(Path("/c/small"))
