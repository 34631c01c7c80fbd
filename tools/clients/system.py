"""The system that clients talk to: `tandem up` as `make run` starts it, on a free port, for the time of a block."""

import contextlib
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from tandem.process.ports import free_ports

_HOST = "127.0.0.1"
_START_S = 180.0
_STOP_S = 60.0
_POLL_S = 0.5


class StartError(Exception):
    """The system did not become ready; the message says where its logs are."""


@contextlib.contextmanager
def served(model: Path, logs: Path, arguments: Sequence[str] = ()) -> Iterator[str]:
    """The address of a ready gateway before one prefill and one decode worker. `arguments`: others of `tandem up`.

    Raises:
        StartError: it is not ready in time, or it ended.
    """
    (port,) = free_ports(1, _HOST, random.SystemRandom())
    command = [sys.executable, "-m", "tandem.cli.main", "up", "--model", str(model), "--prefill", "1", "--decode", "1"]
    process = subprocess.Popen([*command, "--port", str(port), "--quiet", "--log-dir", str(logs), *arguments])
    url = f"http://{_HOST}:{port}"
    try:
        _wait_ready(process, url, logs)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(process: subprocess.Popen[bytes], url: str, logs: Path) -> None:
    deadline_s = time.monotonic() + _START_S
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise StartError(f"tandem up ended with {process.returncode}; its logs are in {logs}")
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            opener.open(f"{url}/ready", timeout=5).close()
            return
        time.sleep(_POLL_S)
    raise StartError(f"the gateway is not ready after {_START_S:g} s; its logs are in {logs}")
