"""The group of ranks of one worker, as its leader has it: starts the others, sends them steps, notices their end.

A group lives once, for one epoch: its sockets and its memory belong to its processes alone, so nothing of another epoch
can reach it. When one rank ends or does not take part in time, the group has ended, and so has its engine.
"""

import logging
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TypeVar

import torch

from tandem.compute import shared_pages
from tandem.compute.native.exchange import SharedExchange, make_memory
from tandem.core.config import EngineConfig
from tandem.core.errors import ConfigurationError, EngineStoppedError
from tandem.core.machine import random_id
from tandem.engine.executor import Executor, StepHandle
from tandem.engine.ranks import ShardSizes, await_kv
from tandem.engine.resolve import default_kv_cache_bytes
from tandem.ranks.hangup import watch_for_hangup
from tandem.ranks.messages import Begin, Loaded, Prepare, Prepared, Refused, Step, ToLeader
from tandem.scheduler.output import SchedulerOutput

EXCHANGE_DEADLINE_S = 20.0
_END_S = 5.0  # until a rank that was told to end is killed
_KEPT_VARIABLES = ("TANDEM_CACHE_DIR",)

_Message = TypeVar("_Message", Loaded, Prepared)

_log = logging.getLogger(__name__)


def share_of(config: EngineConfig, num_ranks: int) -> EngineConfig:
    """What each of `num_ranks` ranks has of the threads and of the KV memory of a worker on the CPU."""
    num_threads = config.num_threads or torch.get_num_threads()
    kv_bytes = config.kv_cache_bytes or default_kv_cache_bytes(torch.device("cpu"))
    return replace(config, num_threads=max(1, num_threads // num_ranks), kv_cache_bytes=max(1, kv_bytes // num_ranks))


class RankGroup:
    """Implements `Ranks`. Starts `num_ranks - 1` processes, which load their parts while the leader loads its own.

    Args:
        config: a rank's, see `share_of`.
        deadline_s: the longest that an exchange, or a message to a rank, waits for it.

    `on_lost` is told on a thread of its own, once, that the group has ended although nobody closed it.
    """

    def __init__(self, config: EngineConfig, num_ranks: int, *, deadline_s: float = EXCHANGE_DEADLINE_S) -> None:
        self._epoch = random_id()
        self._ranks: dict[int, tuple[Connection, subprocess.Popen[bytes]]] = {}
        self._reason: str | None = None
        self._is_closed = False
        self.on_lost: Callable[[], None] | None = None
        memory, self._kv_memory = make_memory(num_ranks), shared_pages.make_memory()
        try:
            self._exchange = SharedExchange(memory, 0, num_ranks, deadline_s=deadline_s)
            for rank in range(1, num_ranks):
                self._ranks[rank] = _start(memory, self._kv_memory)
                _limit_sends(self._ranks[rank][0], deadline_s)
        finally:
            os.close(memory)
        level = logging.getLogger("tandem").getEffectiveLevel()
        for rank in self._ranks:
            self._send(rank, Begin(self._epoch, rank, num_ranks, config, deadline_s, level))
        sockets = {connection.fileno(): rank for rank, (connection, _) in self._ranks.items()}
        self._stop_watching = watch_for_hangup(list(sockets), lambda socket: self._lose(sockets[socket]))

    @property
    def collectives(self) -> SharedExchange:
        return self._exchange

    @property
    def process_ids(self) -> Mapping[int, int]:
        """Of the other ranks."""
        return {rank: process.pid for rank, (_, process) in self._ranks.items()}

    def take_pages(self, num_parts: int, num_blocks: int, page_bytes: int) -> torch.Tensor:
        shared_pages.set_size(self._kv_memory, num_parts * num_blocks * page_bytes)
        return shared_pages.map_pages(self._kv_memory, num_parts, num_blocks, page_bytes)

    def prepare(self, fingerprint: str, sizes: ShardSizes) -> None:
        for rank in self._ranks:
            loaded = self._receive(rank, Loaded)
            if loaded.fingerprint != fingerprint:
                raise ConfigurationError(
                    f"rank {rank} has loaded another model than rank 0, {loaded.fingerprint[:16]} and not "
                    f"{fingerprint[:16]}: the weights were replaced meanwhile; start the worker again"
                )
        for rank in self._ranks:
            self._send(rank, Prepare(sizes))
        for rank in self._ranks:
            self._receive(rank, Prepared)
        _log.info("%d ranks are ready: processes %s", len(self._ranks) + 1, [os.getpid(), *self.process_ids.values()])

    def lead(self, own: Executor) -> "RankedExecutor":
        return RankedExecutor(self, own)

    def begin_step(self, step: Step) -> None:
        """Sends a step to all other ranks.

        Raises:
            EngineStoppedError: the group has ended.
        """
        self.check()
        self._exchange.begin_step(step.number)
        for rank in self._ranks:
            self._send(rank, step)

    def check(self) -> None:
        """Raises `EngineStoppedError` if the group has ended."""
        if self._reason is not None:
            raise EngineStoppedError(self._reason)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        os.close(self._kv_memory)
        self._stop_watching()
        self._exchange.end()
        for connection, _ in self._ranks.values():
            connection.close()  # NOTE: at which a rank ends, whatever it is doing
        for _, process in self._ranks.values():
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:  # stopped by SIGSTOP, or stuck in the kernel
                process.kill()
                process.wait()

    def _lose(self, rank: int) -> None:
        process = self._ranks[rank][1]
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        if self._reason is None:
            self._reason = f"rank {rank} of {len(self._ranks) + 1} has ended, {_ending(process.returncode)}"
            _log.critical("%s: the worker ends with it", self._reason)
            self._exchange.end()
            if self.on_lost is not None:
                self.on_lost()

    def _send(self, rank: int, message: Begin | Prepare | Step) -> None:
        try:
            self._ranks[rank][0].send(message)
        except OSError as error:
            raise EngineStoppedError(f"rank {rank} of {len(self._ranks) + 1} takes no messages: {error}") from error

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
        assert message.epoch == self._epoch
        return message


class RankedExecutor:
    """An `Executor` of all ranks of a group: each step goes to the others, then to this process's own."""

    def __init__(self, group: RankGroup, own: Executor) -> None:
        self._group = group
        self._own = own
        self._num_steps = 0

    def submit(self, step: SchedulerOutput) -> StepHandle:
        self._num_steps += 1
        self._group.begin_step(Step(self._num_steps, step))
        handle = self._own.submit(step)
        await_kv(step, self._group.collectives)
        self._group.check()
        return handle


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
