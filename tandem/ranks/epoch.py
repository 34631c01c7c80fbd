"""One epoch of a group of ranks, as the leader uses it: starts from new processes, and ends when one rank is lost.

The leader (rank 0, the worker's own process) has them load their parts, sends them steps, watches and ends them
together. Sockets and exchange memory belong to the epoch's processes alone, so nothing of another epoch can reach them.
"""

import logging
import os
from collections.abc import Callable, Mapping
from typing import TypeVar

from tandem.core.config import EngineConfig
from tandem.core.errors import ConfigurationError, RanksLostError
from tandem.core.machine import monotonic_s, random_id
from tandem.engine.ranks import ShardSizes
from tandem.ranks.hangup import watch_for_hangup
from tandem.ranks.heartbeat import BEAT_S, START_SILENCE_S, Heartbeats
from tandem.ranks.messages import Begin, FromLeader, Loaded, Prepare, Prepared, Refused, Step, pack
from tandem.ranks.rank_process import END_S, RankProcess, await_ends
from tandem.ranks.system import GroupLinks, Watch

_Message = TypeVar("_Message", Loaded, Prepared)

_log = logging.getLogger(__name__)


class Epoch:
    """The ranks of one epoch without the leader; has them load their parts when it is created.

    Args:
        shared: the leader's exchanges, in a memory that only these ranks have.
        ranks: the started processes, by rank from 1.
        deadline_s: the longest that an exchange within a stage or context waits for a rank.
        on_lost: called once, on a thread of its own, when the epoch has ended without `close`.
    """

    def __init__(
        self,
        config: EngineConfig,
        shared: GroupLinks,
        ranks: Mapping[int, RankProcess],
        deadline_s: float,
        on_lost: Callable[[], None],
        watch: Watch = watch_for_hangup,
    ) -> None:
        self._id = random_id()
        self._shared = shared
        self._on_lost = on_lost
        self._reason: str | None = None
        self._is_closed = False
        self._beats = Heartbeats(shared.beats, monotonic_s(), START_SILENCE_S)
        self._is_ready = False
        self._ranks = ranks
        level = logging.getLogger("tandem").getEffectiveLevel()
        for rank in self._ranks:
            sizes = shared.num_ranks, shared.num_stages
            self._send(rank, Begin(self._id, rank, *sizes, config, deadline_s, level, shared.num_contexts))
        sockets = {process.fileno(): rank for rank, process in self._ranks.items()}
        self._stop_watching = watch(
            list(sockets), lambda socket: self._lose(sockets[socket]), on_time=self._listen, every_s=BEAT_S
        )
        self.num_steps = 0

    @property
    def process_ids(self) -> Mapping[int, int]:
        """Process id of each rank but the leader, on its host."""
        return {rank: process.process_id for rank, process in self._ranks.items()}

    @property
    def hosts(self) -> tuple[str, ...]:
        """Name of each rank's host; "" = the leader's."""
        return "", *(process.host for _, process in sorted(self._ranks.items()))

    @property
    def silent_s(self) -> tuple[float, ...]:
        """Seconds since each rank's last heartbeat; () = the ranks are not ready."""
        return self._beats.silent_s(monotonic_s()) if self._is_ready else ()

    def prepare(self, fingerprint: str, sizes: ShardSizes, *, keeps_pages: bool) -> None:
        """Waits until all ranks have loaded the same model and allocated their memory. Raises `ConfigurationError` if
        one refuses to serve, has ended, or stands still (then it is killed).
        """
        for rank in self._ranks:
            loaded = self._receive(rank, Loaded)
            if loaded.fingerprint != fingerprint:
                raise ConfigurationError(
                    f"rank {rank} has loaded another model than rank 0, {loaded.fingerprint[:16]} and not "
                    f"{fingerprint[:16]}: the weights were replaced meanwhile, or its host has others; start the "
                    "worker again with the same on all hosts"
                )
        for rank in self._ranks:
            self._send(rank, Prepare(sizes, keeps_pages))
        for rank in self._ranks:
            self._receive(rank, Prepared)
        self._beats, self._is_ready = Heartbeats(self._shared.beats, monotonic_s()), True
        _log.info("%d ranks are ready: processes %s", len(self._ranks) + 1, [os.getpid(), *self.process_ids.values()])

    def begin_step(self, step: Step) -> None:
        """Sends a step to all ranks, without waiting for its end. Raises `RanksLostError` if the epoch has ended."""
        self.check()
        self._shared.begin_step(step.number)
        packed = pack(step)
        for rank in self._ranks:
            self._send_packed(rank, packed)

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
        for process in self._ranks.values():
            process.close()
        await_ends(self._ranks.values())

    def _listen(self) -> None:
        """Kills a rank whose heartbeats have stopped."""
        if self._reason is not None:
            return
        beats = self._beats
        rank = beats.silent_rank(self._shared.beats, monotonic_s())
        if rank is not None:
            self._ranks[rank].kill()
            self._lose(rank, f"has stood still for {beats.limit_s:g} s")

    def _lose(self, rank: int, why: str | None = None) -> None:
        """Ends the epoch since a rank is lost. `why`: None = its process ended."""
        process = self._ranks[rank]
        process.wait(END_S)
        if self._reason is None:
            why = f"has ended, {process.ending}" if why is None else why
            self._reason = f"rank {rank} of {len(self._ranks) + 1} {why}"
            _log.critical("%s: the group ends with it", self._reason)
            self._shared.end()
            self._on_lost()

    def _send(self, rank: int, message: FromLeader) -> None:
        self._send_packed(rank, pack(message))

    def _send_packed(self, rank: int, packed: bytes) -> None:
        try:
            self._ranks[rank].send(packed)
        except OSError as error:
            raise RanksLostError(f"rank {rank} of {len(self._ranks) + 1} takes no messages: {error}") from error

    def _receive(self, rank: int, kind: type[_Message]) -> _Message:
        """Raises `ConfigurationError` where the rank refuses to serve or has ended."""
        process = self._ranks[rank]
        try:
            message = process.receive()
        except (EOFError, OSError) as error:
            process.wait(END_S)
            raise ConfigurationError(f"rank {rank} has ended before it could serve, {process.ending}") from error
        if isinstance(message, Refused):
            raise ConfigurationError(f"rank {rank}: {message.reason}")
        if not isinstance(message, kind) or message.epoch != self._id:
            raise ConfigurationError(
                f"rank {rank} says {type(message).__name__} where {kind.__name__} of this epoch was due: its host does "
                "not follow the protocol; end it and start the worker again"
            )
        return message
