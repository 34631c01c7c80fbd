"""Tandem in the race: `tandem up` as a user runs it, with its own router and gateway, in a session of its own."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx

from bench.race.system import KV_CACHE_GIB, Served
from tandem.core.errors import UnavailableError
from tandem.process.ports import free_ports

_HOST = "127.0.0.1"
_MODEL = "race"
_START_S = 300.0
_STOP_S = 60.0
_POLL_S = 0.2
_SHOWN_LINES = 20
FLAGS = ("--dtype", "bfloat16", "--max-model-len", "4096", "--kv-cache-gib", str(KV_CACHE_GIB))


@dataclass(frozen=True, slots=True)
class Tandem:
    """A cluster on this machine. `num_prefill` 0: one worker does both. Logs go below `directory`.

    `weights` makes what is served of a checkpoint; None: the checkpoint itself.
    """

    name: str
    num_prefill: int
    directory: Path
    flags: tuple[str, ...] = ()
    weights: Callable[[Path], Path] | None = None

    def prepare(self) -> None:
        """Nothing: it runs in the environment of the race itself."""

    @contextmanager
    def serve(self, checkpoint: Path) -> Iterator[Served]:
        (port,) = free_ports(1, _HOST, random.SystemRandom())
        self.directory.mkdir(parents=True, exist_ok=True)
        log = self.directory / f"{self.name}.log"
        model = checkpoint if self.weights is None else self.weights(checkpoint)
        with log.open("wb") as output:
            process = subprocess.Popen(
                self.command(model, port), stdout=output, stderr=output, start_new_session=True, env=_environment()
            )
        try:
            self._await_ready(process, port, log)
            pools = (1 + self.num_prefill) * KV_CACHE_GIB << 30
            num_bytes = None if self.weights is None else weight_bytes(model)
            ready = partial(self._is_ready, port)
            yield Served(f"http://{_HOST}:{port}", _MODEL, (process.pid,), pools, ready, num_bytes)
        finally:
            _end(process)

    def body(self, prompt: Sequence[int], num_output: int) -> dict[str, object]:
        return {"ignore_eos": True, "return_token_ids": True}

    def command(self, checkpoint: Path, port: int) -> list[str]:
        """Command that starts it."""
        command = [sys.executable, "-m", "tandem.cli.main", "up", "--model", str(checkpoint), "--port", str(port)]
        command += ["--served-model-name", _MODEL, "--prefill", str(self.num_prefill), "--decode", "1", "--quiet"]
        return [*command, *FLAGS, *self.flags]

    def _await_ready(self, process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
        deadline_s = time.monotonic() + _START_S
        while time.monotonic() < deadline_s:
            if process.poll() is not None:
                raise UnavailableError(f"{self.name} ended with code {process.returncode}:\n{_tail(log)}")
            if self._is_ready(port):
                return
            time.sleep(_POLL_S)
        raise UnavailableError(f"{self.name} is not ready after {_START_S:g} s:\n{_tail(log)}")

    def _is_ready(self, port: int) -> bool:
        state = _state(port)
        return state.get("num_decode") == 1 and state.get("num_prefill") == self.num_prefill


def ours(directory: Path, flags: Sequence[str] = (), speculate: str = "") -> tuple[Tandem, ...]:
    """Both ways to run it. `flags`: more of them for all. `speculate`: the first way once more, with that drafter."""
    logs = directory / "logs"
    drafting = Tandem("tandem-drafts", 0, logs, (*flags, "--speculate", speculate))
    both = Tandem("tandem", 0, logs, tuple(flags)), Tandem("tandem-1p1d", 1, logs, tuple(flags))
    return (*both, drafting) if speculate else both


def weight_bytes(model: Path) -> int:
    """Of the files that hold a model's weights."""
    files = [model] if model.is_file() else [*model.glob("*.safetensors"), *model.glob("openvino_model.bin")]
    return sum(file.stat().st_size for file in files)


def _environment() -> dict[str, str]:
    """Without settings of the user's own clusters."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    return kept | {"TOKENIZERS_PARALLELISM": "false"}


def _state(port: int) -> dict[str, object]:
    try:
        found = httpx.get(f"http://{_HOST}:{port}/ready", timeout=2, trust_env=False).json()
    except (httpx.HTTPError, json.JSONDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:])


def _end(process: "subprocess.Popen[bytes]") -> None:
    """It ends its processes itself; the kernel ends them with it when it is killed."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
