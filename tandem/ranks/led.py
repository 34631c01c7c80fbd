"""A rank as its leader has it: a process of this host, or of another one (`remote`)."""

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


class LedRank(Protocol):
    """One process, from its start on. `process_id`: on its host."""

    @property
    def process_id(self) -> int: ...

    @property
    def host(self) -> str:
        """The name of its host; "" = the leader's."""
        ...

    def fileno(self) -> int:
        """A socket whose other end is closed once the process has ended."""
        ...

    def send(self, packed: bytes) -> None:
        """A message of a leader. Raises OSError where it takes none."""
        ...

    def receive(self) -> ToLeader:
        """Its next message, which is waited for. Raises EOFError or OSError where it has ended."""
        ...

    def kill(self) -> None:
        """Ends it by force."""
        ...

    def wait(self, timeout_s: float | None) -> bool:
        """Whether it has ended within so many seconds; None = however long that takes."""
        ...

    @property
    def ending(self) -> str:
        """Exit code or signal that has ended it, as far as it is known, as the rest of a sentence."""
        ...

    def close(self) -> None:
        """Tells it to end, whatever it is doing."""
        ...


def await_ends(ranks: Iterable[LedRank]) -> None:
    """Waits until ranks that were told to end have; those that do not in time are killed."""
    for led in ranks:
        if not led.wait(END_S):  # stopped by SIGSTOP, or stuck in the kernel
            led.kill()
            led.wait(None)


class LocalRank:
    """A process of this host, which is started.

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
        """As `close`, also while another thread receives, which then has the end."""
        with suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)


def _limit_sends(connection: Connection, seconds: float) -> None:
    """A rank that hangs reads nothing, and a message that it does not read must not hold up the leader for ever."""
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
    """A process of a rank, which inherits the descriptors: of its socket, the group's memory and that of KV."""
    command = [sys.executable, "-m", "tandem.ranks.rank", *map(str, descriptors)]
    return subprocess.Popen(command, pass_fds=descriptors, env=environment, stdin=subprocess.DEVNULL)
