"""`make load`: a short closed-loop and a short open-loop test, one after the other, as a user would run them.

Runs `tandem load` as a process, against the gateway at `url` or else a cluster that `tandem up` starts for it and that
is stopped afterwards. Results and pictures of a test lie in DIRECTORY/closed, /open or /own, the cluster's logs in
DIRECTORY/logs.
"""

import contextlib
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import Field

from tandem.process.command import run_command
from tandem.process.ports import free_ports
from tandem.process.settings import Settings

_HOST = "127.0.0.1"
_START_S = 120.0
_STOP_S = 60.0
_LOADS = {  # flags of `tandem load`, by the name of a test
    "closed": ("--concurrency", "4", "--shared-prefix-share", "0.5", "--turns", "1-3"),
    "open": ("--rate", "3", "--arrivals", "bursty", "--prompt-tokens", "lognormal:200,600,1500"),
}


class Demo(Settings, cli_prog_name="python -m tandem.loadtest.demo", env_prefix="TANDEM_LOAD_DEMO_"):
    """Run a short load test of each kind and keep results and pictures."""

    url: str = Field("", description="address of a gateway; omitted: of a cluster that is started for it")
    model: str = Field("demo/tandem-demo", description="what that cluster serves")
    prefill: int = Field(1, ge=0, description="its prefill workers")
    decode: int = Field(1, ge=1, description="its decode workers")
    duration_s: float = Field(20.0, gt=0, description="of each load, seconds")
    warm_up_s: float = Field(3.0, ge=0, description="before each, seconds")
    directory: Path = Field(Path("build/load"), description="where results and pictures go")
    load: list[str] = Field([], description="instead of both loads, one with these flags; repeatable: --load=--rate=9")

    def run(self) -> int:
        """Runs all loads; returns the highest exit code."""
        loads = {"own": tuple(self.load)} if self.load else _LOADS
        with self._gateway() as url:
            return max(self._load(url, name, flags) for name, flags in loads.items())

    @contextlib.contextmanager
    def _gateway(self) -> Iterator[str]:
        """The gateway's URL; a cluster started for the demo is stopped at the end."""
        if self.url:
            yield self.url
            return
        (port,) = free_ports(1, _HOST, random.SystemRandom())
        logs = self.directory / "logs"
        flags = ["--model", self.model, "--port", str(port), "--prefill", str(self.prefill), "--log-dir", str(logs)]
        process = _start("up", *flags, "--decode", str(self.decode), "--quiet")
        try:
            yield f"http://{_HOST}:{port}"
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _load(self, url: str, name: str, flags: Sequence[str]) -> int:
        directory = self.directory / name
        times = ("--duration-s", str(self.duration_s), "--warm-up-s", str(self.warm_up_s))
        kept = ("--output", str(directory / "result.json"), "--figures", str(directory))
        ready = ("--ready-timeout-s", str(_START_S))
        return _start("load", "--url", url, *ready, *times, *kept, *flags).wait()


def _start(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "tandem.cli.main", *arguments])


if __name__ == "__main__":
    sys.exit(run_command(Demo, sys.argv[1:]))
