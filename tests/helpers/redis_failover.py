"""A real Redis, its replica and a Sentinel that promotes it: for tests of who follows a failover and what it loses."""

import contextlib
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import RedisError

from tandem.process.ports import free_ports
from tests.helpers.redis_server import MISSING, RedisServer

SERVICE = "tandem"
_DOWN_MS = 1000  # NOTE: a replica that was cut off for ten times as long is not promoted
_PATIENCE_S = 30.0
_POLL_S = 0.02


class RedisPair:
    """`master` until `fail_over`; `replica` after it. `url` names the Sentinel, behind one that is down."""

    def __init__(self, master: RedisServer, replica: RedisServer, directory: str) -> None:
        self.master, self.replica = master, replica
        port, down = free_ports(2, "127.0.0.1", random.SystemRandom())
        self.url = f"redis+sentinel://127.0.0.1:{down},127.0.0.1:{port}/{SERVICE}"
        with replica.client() as client:
            client.replicaof("127.0.0.1", str(master.port))
        wait_until(self._is_replicated)
        self._sentinel_port = port
        self._sentinel = _sentinel(port, master.port, directory)
        wait_until(self._is_watched)

    def cut_replication(self) -> None:
        """From now on the replica hears of nothing: what the master acknowledges is lost with it.

        NOTE: a stopped replica would read it from its socket later; one that cannot log in reads nothing.
        """
        with self.replica.client() as replica, self.master.client() as master:
            replica.config_set("masterauth", "which the master does not ask for")
            master.client_kill_filter(_type="replica")
        wait_until(lambda: not self._is_replicated())

    def fail_over(self) -> None:
        """Kill the master; returns when the Sentinel names the replica."""
        self.master.kill()
        wait_until(lambda: self._named_port() == self.replica.port)

    def close(self) -> None:
        self._sentinel.kill()
        self._sentinel.wait()

    def _is_replicated(self) -> bool:
        with self.replica.client() as client:
            return bool(client.info("replication").get("master_link_status") == "up")

    def _is_watched(self) -> bool:
        with Redis(port=self._sentinel_port) as sentinel:
            return bool(sentinel.sentinel_slaves(SERVICE))

    def _named_port(self) -> int:
        with Redis(port=self._sentinel_port) as sentinel, self.replica.client() as replica:
            port: int = sentinel.sentinel_get_master_addr_by_name(SERVICE)[1]
            return port if replica.info("replication")["role"] == "master" else 0


def wait_until(holds: Callable[[], bool]) -> None:
    """AssertionError when it does not in time; a Redis that does not answer counts as false."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        with contextlib.suppress(RedisError):
            if holds():
                return
        assert time.monotonic() < deadline_s, f"{holds} does not hold after {_PATIENCE_S:g} s"
        time.sleep(_POLL_S)


@contextlib.contextmanager
def running_pair() -> Iterator[RedisPair]:
    """For the time of the block. Skips the test, with the remedy, where there is no redis-server."""
    if shutil.which("redis-server") is None:
        pytest.skip(MISSING)
    with contextlib.ExitStack() as opened:
        directories = [opened.enter_context(tempfile.TemporaryDirectory()) for _ in range(3)]
        master, replica = (RedisServer(directory) for directory in directories[:2])
        for server in (master, replica):
            opened.callback(server.kill)
        pair = RedisPair(master, replica, directories[2])
        opened.callback(pair.close)
        yield pair


def _sentinel(port: int, master_port: int, directory: str) -> "subprocess.Popen[bytes]":
    program = shutil.which("redis-server")
    assert program is not None, MISSING
    config = Path(directory) / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {directory}\n"
        f"sentinel monitor {SERVICE} 127.0.0.1 {master_port} 1\n"
        f"sentinel down-after-milliseconds {SERVICE} {_DOWN_MS}\n"
        f"sentinel failover-timeout {SERVICE} 2000\n"
    )
    argv = [program, str(config), "--sentinel"]
    return subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
