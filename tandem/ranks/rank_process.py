"""One rank, as its leader uses it: a process on this host (`LocalRank`), or on another one (`remote.RemoteRank`)."""

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Protocol

from tandem.ranks.messages import ToLeader, unpack

END_S = 5.0  # until a rank that was told to end is killed
_KEPT_VARIABLES = ("TANDEM_CACHE_DIR",)


class RankProcess(Protocol):
    """A started process that computes a rank's part. `process_id`: on its host."""

    @property
    def process_id(self) -> int: ...

    @property
    def host(self) -> str:
        """The name of its host; "" = the leader's."""
        ...

    def fileno(self) -> int:
        """Descriptor of a socket whose other end is closed once the process has ended."""
        ...

    def send(self, packed: bytes) -> None:
        """Sends a packed message of the leader. Raises OSError if the process does not take it."""
        ...

    def receive(self) -> ToLeader:
        """Waits for its next message. Raises EOFError or OSError if it has ended."""
        ...

    def kill(self) -> None:
        """Ends it by force (SIGKILL)."""
        ...

    def wait(self, timeout_s: float | None) -> bool:
        """Waits for its end, at most `timeout_s` (None = without limit); returns whether it has ended."""
        ...

    @property
    def ending(self) -> str:
        """Reason of its end, as far as known: exit code or signal, phrased as the rest of a sentence."""
        ...

    def close(self) -> None:
        """Closes its connection, so that it ends, whatever it is doing."""
        ...


def await_ends(ranks: Iterable[RankProcess]) -> None:
    """Waits until ranks that were told to end have; those that do not in time are killed."""
    for process in ranks:
        if not process.wait(END_S):  # stopped by SIGSTOP, or stuck in the kernel
            process.kill()
            process.wait(None)


class LocalRank:
    """Starts a process on this host. Implements `RankProcess`.

    Args:
        memory, kv_memory: descriptors that it inherits; the caller may close them after this.
        deadline_s: the longest that a message waits for it.
    """

    def __init__(self, memory: int, kv_memory: int, deadline_s: float) -> None:
        self.connection, self._process = _start(memory, kv_memory)
        _limit_sends(self.connection, deadline_s)

    host = ""

    @property
    def process_id(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, packed: bytes) -> None:
        self.connection.send_bytes(packed)

    def receive(self) -> ToLeader:
        message: ToLeader = unpack(self.connection.recv_bytes())
        return message

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout_s: float | None) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self._process.returncode is not None

    @property
    def ending(self) -> str:
        code = self._process.returncode
        if code is None:
            return "but its process is still there"
        return f"by signal {-code}" if code < 0 else f"with exit code {code}"

    def close(self) -> None:
        self.connection.close()

    def hang_up(self) -> None:
        """Like `close`, but also ends a `receive` that another thread waits in."""
        with suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)


def _limit_sends(connection: Connection, seconds: float) -> None:
    """Limits the time of sends: a rank that hangs reads nothing, and must not hold up the leader for ever."""
    whole = int(seconds)
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        limit = struct.pack("@ll", whole, int((seconds - whole) * 1e6))
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _start(memory: int, kv_memory: int) -> tuple[Connection, subprocess.Popen[bytes]]:
    """NOTE: nothing of ours is in its environment, the cluster's secret least of all."""
    ours, theirs = Pipe()
    own = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")} | own
    with theirs:
        return ours, start_process((theirs.fileno(), memory, kv_memory), environment)


def start_process(descriptors: Sequence[int], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts the process of a rank, which inherits `descriptors`: its socket, the exchange memory and the KV memory."""
    command = [sys.executable, "-m", "tandem.ranks.rank", *map(str, descriptors)]
    return subprocess.Popen(command, pass_fds=descriptors, env=environment, stdin=subprocess.DEVNULL)
