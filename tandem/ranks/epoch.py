"""The ranks of one epoch, as their leader has them: processes that are started, spoken to, watched and ended together.

Its sockets and its exchange memory belong to these processes alone, so nothing of another epoch can reach them. When
one rank ends, or stands still, the epoch has ended.
"""

import logging
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TypeVar

from tandem.compute.native.links import SharedLinks
from tandem.core.config import EngineConfig
from tandem.core.errors import ConfigurationError, RanksLostError
from tandem.core.machine import monotonic_s, random_id
from tandem.engine.ranks import ShardSizes
from tandem.ranks.hangup import watch_for_hangup
from tandem.ranks.heartbeat import BEAT_S, SILENCE_S, Heartbeats
from tandem.ranks.messages import Begin, Loaded, Prepare, Prepared, Refused, Step, ToLeader

_END_S = 5.0  # until a rank that was told to end is killed
_KEPT_VARIABLES = ("TANDEM_CACHE_DIR",)

_Message = TypeVar("_Message", Loaded, Prepared)

_log = logging.getLogger(__name__)


class Epoch:
    """Starts the ranks 1 and up, which begin to load their parts.

    Args:
        shared: the leader's, in the memory that is given.
        memory, kv_memory: descriptors, which the caller may close after this.
        deadline_s: the longest that an exchange, or a message to a rank, waits for it.
        on_lost: told on a thread of its own, once, that the epoch has ended although nobody closed it.
    """

    def __init__(
        self,
        config: EngineConfig,
        shared: SharedLinks,
        memory: int,
        kv_memory: int,
        deadline_s: float,
        on_lost: Callable[[], None],
    ) -> None:
        self._id = random_id()
        self._shared = shared
        self._on_lost = on_lost
        self._reason: str | None = None
        self._is_closed = False
        self._beats: Heartbeats | None = None
        self._ranks: dict[int, tuple[Connection, subprocess.Popen[bytes]]] = {}
        for rank in range(1, shared.num_ranks):
            self._ranks[rank] = _start(memory, kv_memory)
            _limit_sends(self._ranks[rank][0], deadline_s)
        level = logging.getLogger("tandem").getEffectiveLevel()
        for rank in self._ranks:
            begin = Begin(self._id, rank, shared.num_ranks, shared.num_stages, config, deadline_s, level)
            self._send(rank, begin)
        sockets = {connection.fileno(): rank for rank, (connection, _) in self._ranks.items()}
        self._stop_watching = watch_for_hangup(
            list(sockets), lambda socket: self._lose(sockets[socket]), on_time=self._listen, every_s=BEAT_S
        )
        self.num_steps = 0

    @property
    def process_ids(self) -> Mapping[int, int]:
        """Of the ranks but the leader."""
        return {rank: process.pid for rank, (_, process) in self._ranks.items()}

    def prepare(self, fingerprint: str, sizes: ShardSizes, *, keeps_pages: bool) -> None:
        """Waits until all ranks have loaded the same model and taken their memory; raises as `Ranks.prepare`."""
        for rank in self._ranks:
            loaded = self._receive(rank, Loaded)
            if loaded.fingerprint != fingerprint:
                raise ConfigurationError(
                    f"rank {rank} has loaded another model than rank 0, {loaded.fingerprint[:16]} and not "
                    f"{fingerprint[:16]}: the weights were replaced meanwhile; start the worker again"
                )
        for rank in self._ranks:
            self._send(rank, Prepare(sizes, keeps_pages))
        for rank in self._ranks:
            self._receive(rank, Prepared)
        self._beats = Heartbeats(self._shared.beats, monotonic_s())
        _log.info("%d ranks are ready: processes %s", len(self._ranks) + 1, [os.getpid(), *self.process_ids.values()])

    def begin_step(self, step: Step) -> None:
        """Sends a step to all ranks; raises as `check`."""
        self.check()
        self._shared.begin_step(step.number)
        for rank in self._ranks:
            self._send(rank, step)

    def check(self) -> None:
        """Raises `RanksLostError` if the epoch has ended."""
        if self._reason is not None:
            raise RanksLostError(self._reason)

    def close(self) -> None:
        """Ends all processes; on return none is left. Harmless if repeated."""
        if self._is_closed:
            return
        self._is_closed = True
        self._stop_watching()
        self._shared.end()
        for connection, _ in self._ranks.values():
            connection.close()  # NOTE: at which a rank ends, whatever it is doing
        for _, process in self._ranks.values():
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:  # stopped by SIGSTOP, or stuck in the kernel
                process.kill()
                process.wait()

    def _listen(self) -> None:
        """Ends the process of a rank that stands still."""
        if self._beats is None or self._reason is not None:
            return
        rank = self._beats.silent_rank(self._shared.beats, monotonic_s())
        if rank is not None:
            self._ranks[rank][1].kill()
            self._lose(rank, f"has stood still for {SILENCE_S:g} s")

    def _lose(self, rank: int, why: str | None = None) -> None:
        """`why`: None = as its process ended."""
        process = self._ranks[rank][1]
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        if self._reason is None:
            why = f"has ended, {_ending(process.returncode)}" if why is None else why
            self._reason = f"rank {rank} of {len(self._ranks) + 1} {why}"
            _log.critical("%s: the group ends with it", self._reason)
            self._shared.end()
            self._on_lost()

    def _send(self, rank: int, message: Begin | Prepare | Step) -> None:
        try:
            self._ranks[rank][0].send(message)
        except OSError as error:
            raise RanksLostError(f"rank {rank} of {len(self._ranks) + 1} takes no messages: {error}") from error

    def _receive(self, rank: int, kind: type[_Message]) -> _Message:
        """Raises `ConfigurationError` where the rank refuses to serve or has ended."""
        connection, process = self._ranks[rank]
        try:
            message: ToLeader = connection.recv()
        except (EOFError, OSError) as error:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            raise ConfigurationError(
                f"rank {rank} has ended before it could serve, {_ending(process.returncode)}"
            ) from error
        if isinstance(message, Refused):
            raise ConfigurationError(f"rank {rank}: {message.reason}")
        assert isinstance(message, kind)
        assert message.epoch == self._id
        return message


def _ending(returncode: int | None) -> str:
    if returncode is None:
        return "but its process is still there"
    return f"by signal {-returncode}" if returncode < 0 else f"with exit code {returncode}"


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
        command = [sys.executable, "-m", "tandem.ranks.rank", *map(str, (theirs.fileno(), memory, kv_memory))]
        passed = [theirs.fileno(), memory, kv_memory]
        process = subprocess.Popen(command, pass_fds=passed, env=environment, stdin=subprocess.DEVNULL)
    return ours, process
