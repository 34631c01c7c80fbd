"""A real redis-server for tests: a random loopback port, a temporary directory, nothing kept on disk."""

import contextlib
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from tandem.process.ports import free_ports

MISSING = "redis-server is not on PATH: install it with the system's package manager (apt-get install redis-server)"
_READY_S = 10.0


class RedisServer:
    """One server process that can be killed, started again on its port, stopped and continued."""

    def __init__(self, directory: str) -> None:
        (self.port,) = free_ports(1, "127.0.0.1", random.SystemRandom())
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, empty, and wait until it answers."""
        program = shutil.which("redis-server")
        assert program is not None, MISSING
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", self._directory]
        options += ["--save", "", "--appendonly", "no", "--daemonize", "no", "--loglevel", "warning"]
        self._process = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline_s = time.monotonic() + _READY_S
        while not self._answers():
            assert self._process.poll() is None, f"redis-server on port {self.port} ended at once"
            assert time.monotonic() < deadline_s, f"redis-server on port {self.port} does not answer"

    def kill(self) -> None:
        """SIGKILL; whatever it held is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """SIGSTOP for the time of the block: connections are accepted, nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def client(self) -> Redis:
        """A plain client, to look behind the index or to damage it."""
        return Redis.from_url(self.url)

    def _answers(self) -> bool:
        with contextlib.closing(self.client()) as client:
            try:
                return bool(client.ping())
            except RedisConnectionError:
                return False


@contextlib.contextmanager
def running_redis() -> Iterator[RedisServer]:
    """A server for the time of the block. Skips the test, with the remedy, where there is no redis-server."""
    if shutil.which("redis-server") is None:
        pytest.skip(MISSING)
    with tempfile.TemporaryDirectory() as directory:
        server = RedisServer(directory)
        try:
            yield server
        finally:
            server.kill()
