"""transformers: its command line, and that it is told nothing a request could tell it."""

from pathlib import Path

from bench.race.peers.process import cores
from bench.race.peers.transformers import Transformers
from bench.race.system import KV_CACHE_GIB


def test_command(tmp_path: Path) -> None:
    system = Transformers(build=tmp_path)
    assert system.command(Path("/c"), 80) == [
        str(tmp_path / "venvs" / "transformers" / "bin" / "python"),
        *("-m", "bench.race.peers.scripts.transformers_server", "--model", "/c", "--name", "m", "--port", "80"),
        *("--threads", str(len(cores())), "--cache-gb", str(KV_CACHE_GIB), "--dtype", "bfloat16"),
    ]
    assert system.body([1], 1) == {}
