"""Ranks of simulated workers: each is a node of its own that runs production's `ranks.rank` in a fiber.

Processes, sockets, shared memory and the model are simulated. The handling of messages and of lost ranks is
production's.
"""

import itertools
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch

from tandem.compute.collectives import RankLinks
from tandem.core.config import EngineConfig
from tandem.core.errors import ConfigurationError
from tandem.engine.forward_pass import ForwardPass
from tandem.engine.ranks import LoadedShard, ShardRunner, ShardSizes
from tandem.ranks import rank as led_rank
from tandem.ranks.heartbeat import BEAT_S
from tandem.ranks.messages import Begin, ToLeader, unpack
from tandem.ranks.system import GroupLinks
from tandem.simulation.executor import StepCost
from tandem.simulation.fabric import Fabric
from tandem.simulation.fibers import Fiber, Signal, current_fiber
from tandem.simulation.held_kv import HeldKV
from tandem.simulation.model import FINGERPRINT
from tandem.simulation.node import Node
from tandem.simulation.rank_links import ExchangeMemory, SimulatedLinks
from tandem.simulation.ranked_executor import SimulatedForward

_SOCKET_S = 1e-4  # delay of a message between leader and rank
_LOAD_S = (0.2, 0.8)  # range of the time that loading takes
_KILLED = -9  # exit code after SIGKILL

OnWrite = Callable[[Sequence[int]], None]


class SimulatedRank:
    """Process of a rank; implements `ranks.rank_process.RankProcess` for its leader. `slowness` of its node multiplies
    the duration of its steps.
    """

    def __init__(self, system: "SimulatedRankSystem", node: Node, memory: int, kv_memory: int, number: int) -> None:
        self.node, self.process_id = node, number
        self._system, self._memory, self._kv_memory = system, memory, kv_memory
        self._arrived: deque[bytes] = deque()  # from the leader
        self._answers: deque[bytes] = deque()
        self._has_mail = Signal()
        self._is_hung_up = False
        self.code: int | None = None
        self._fiber = Fiber(system.loop, node, self._run, self._end_of_work)
        self._result = 0

    @property
    def has_ended(self) -> bool:
        return self.code is not None

    @property
    def host(self) -> str:
        return ""

    @property
    def ending(self) -> str:
        if self.code is None:
            return "but its process is still there"
        return f"by signal {-self.code}" if self.code < 0 else f"with exit code {self.code}"

    def fileno(self) -> int:
        return self.process_id

    def send(self, packed: bytes) -> None:
        if self.has_ended or self._is_hung_up:
            raise BrokenPipeError(f"rank process {self.process_id} reads nothing any more")
        self._system.loop.call_later(_SOCKET_S, self._take, packed, context=self.node.context)

    def receive(self) -> ToLeader:
        self._system.wait_for(lambda: bool(self._answers) or self.has_ended)
        if not self._answers:
            raise EOFError(self.ending)
        message: ToLeader = unpack(self._answers.popleft())
        return message

    def kill(self) -> None:
        self.end(_KILLED)

    def wait(self, timeout_s: float | None) -> bool:
        self._system.wait_for(lambda: self.has_ended, timeout_s)
        return self.has_ended

    def close(self) -> None:
        """Closes the leader's end of the socket; the rank exits when it notices, unless it is paused."""
        if not self._is_hung_up:
            self._is_hung_up = True
            self._system.loop.call_later(_SOCKET_S, self.end, 0, context=self.node.context)

    def end(self, code: int) -> None:
        """Ends the process with this exit code."""
        if self.code is None:
            self.code = code
            self._system.loop.kill(self.node)
            self._system.changed.notify()

    def send_bytes(self, data: bytes) -> None:
        """Sends to the leader; called by the rank."""
        self._system.loop.call_later(_SOCKET_S, self._answer, data, context=self._system.loop.world.context)

    def recv_bytes(self) -> bytes:
        """Receives from the leader; called by the rank."""
        current_fiber().wait_for(lambda: bool(self._arrived) or self._is_hung_up, self._has_mail)
        if not self._arrived:
            raise EOFError
        return self._arrived.popleft()

    def _take(self, data: bytes) -> None:
        self._arrived.append(data)
        self._has_mail.notify()

    def _answer(self, data: bytes) -> None:
        if not self.has_ended:
            self._answers.append(data)
            self._system.changed.notify()

    def _run(self) -> None:
        self._result = led_rank.run(self, self._open_links, self._load, self._kv_memory, lambda: None)

    def _end_of_work(self, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, EOFError | OSError):
            raise error
        self.end(0 if error is not None else self._result)

    def _open_links(self, begin: Begin) -> GroupLinks:
        assert begin.num_stages == begin.num_contexts == 1
        self._links = SimulatedLinks(self._system.links_memory, self._memory, begin.rank, begin.deadline_s)
        self._beat(self._links)
        return self._links

    def _load(self, config: EngineConfig, links: RankLinks) -> LoadedShard:
        current_fiber().sleep(self.node.random.uniform(*_LOAD_S))
        if self._system.is_refusing:
            raise ConfigurationError("there are fewer devices than ranks")
        return LoadedShard(FINGERPRINT, self._runner)

    def _runner(self, sizes: ShardSizes, kv_memory: int, keeps_pages: bool) -> ShardRunner:
        exchange = self._links.exchange
        pages = self._system.kv[kv_memory][exchange.rank]
        if not keeps_pages:
            pages.zero_()
        held = HeldKV(pages, self._system.block_size, exchange.rank, exchange.num_ranks)
        forward = SimulatedForward(held, self._system.block_size, exchange, self.node, self._system.cost)
        forward.on_write = lambda blocks: self._system.on_write(blocks)
        return ShardRunner(cast(ForwardPass, forward), self._links.links)

    def _beat(self, shared: GroupLinks) -> None:
        def beat() -> None:
            shared.beat()
            self._system.loop.call_later(BEAT_S, beat, context=self.node.context)

        beat()


class SimulatedRankSystem:
    """`ranks.system.RankSystem`, by which a leader starts ranks and makes the memory that they share. `ranks`:
    processes of the present epoch, by rank; `started`: of all epochs.

    `is_refusing`: those that are started cannot load their part. `on_write`: as of the executor, for all ranks.
    """

    def __init__(self, fabric: Fabric, leader: Node, block_size: int, cost: StepCost, seed: str) -> None:
        self.loop, self._fabric, self._leader, self._seed = fabric.loop, fabric, leader, seed
        self.block_size, self.cost = block_size, cost
        self.ranks: dict[int, SimulatedRank] = {}
        self.started: list[SimulatedRank] = []
        self.changed = Signal()
        self.kv: dict[int, torch.Tensor] = {}
        self.is_refusing = False
        self.on_write: OnWrite = lambda _: None
        self._links: dict[int, ExchangeMemory] = {}
        self._numbers = itertools.count(1)

    def wait_for(self, is_so: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Waits in the leader's fiber, at most `timeout_s` of virtual time, until `is_so()`; returns whether it is."""
        return current_fiber().wait_for(is_so, self.changed, timeout_s)

    def links_memory(self, descriptor: int) -> ExchangeMemory:
        """The exchange memory of a descriptor."""
        return self._links[descriptor]

    def make_kv_memory(self) -> int:
        return next(self._numbers)

    def take_kv(self, memory: int, num_parts: int, num_pages: int, page_bytes: int) -> torch.Tensor:
        assert memory not in self.kv
        self.kv[memory] = torch.zeros(num_parts, num_pages, page_bytes, dtype=torch.uint8)
        return self.kv[memory]

    def make_links_memory(self, num_ranks: int, num_sections: int) -> int:
        descriptor = next(self._numbers)
        self._links[descriptor] = ExchangeMemory(num_ranks, self._can_see)
        return descriptor

    def open_links(
        self, memory: int, num_ranks: int, num_stages: int, num_contexts: int, deadline_s: float
    ) -> SimulatedLinks:
        return SimulatedLinks(self.links_memory, memory, 0, deadline_s)

    def start_rank(self, memory: int, kv_memory: int, deadline_s: float) -> SimulatedRank:
        links = self._links[memory]
        rank, number = links.num_started, next(self._numbers)
        links.num_started += 1
        node = Node(self.name_of(rank), self.loop.time, random.Random(f"{self._seed} {number}"))
        self.loop.add(node)
        process = self.ranks[rank] = SimulatedRank(self, node, memory, kv_memory, number)
        self.started.append(process)
        return process

    def close(self, memory: int) -> None:
        """No effect: what was opened of the memory stays."""

    def watch(
        self,
        descriptors: Sequence[int],
        on_hangup: Callable[[int], None],
        *,
        on_time: Callable[[], None] | None = None,
        every_s: float | None = None,
    ) -> Callable[[], None]:
        watched = {
            process.process_id: process for process in self.ranks.values() if process.process_id in set(descriptors)
        }
        return _Watching(self, self._leader, watched, on_hangup, on_time, every_s).stop

    def name_of(self, rank: int) -> str:
        """Name of a rank's node; partitions are between two such names."""
        return self._leader.name if rank == 0 else f"{self._leader.name}.{rank}"

    def heal(self) -> None:
        """Wakes all waiting fibers after a partition has ended."""
        for links in self._links.values():
            links.changed.notify()

    def die(self, *, is_silent: bool) -> None:
        """Records that the leader has died. Its ranks end when they notice, or at once if their host died too
        (`is_silent`).
        """
        for process in self.started:
            if is_silent:
                process.end(_KILLED)
            else:
                process.close()

    def _can_see(self, source: int, target: int) -> bool:
        return not self._fabric.is_blocked(self.name_of(source), self.name_of(target))


class _Watching:
    """A watch as `watch_for_hangup` starts it."""

    def __init__(
        self,
        system: SimulatedRankSystem,
        node: Node,
        watched: Mapping[int, SimulatedRank],
        on_hangup: Callable[[int], None],
        on_time: Callable[[], None] | None,
        every_s: float | None,
    ) -> None:
        self._system, self._watched = system, dict(watched)
        self._on_hangup, self._on_time, self._every_s = on_hangup, on_time, every_s
        self._is_stopped = self._has_ended = False
        self._fiber = Fiber(system.loop, node, self._run)

    def stop(self) -> None:
        self._is_stopped = True
        self._system.changed.notify()
        if current_fiber() is not self._fiber:
            self._system.wait_for(lambda: self._has_ended)

    def _run(self) -> None:
        while not self._is_stopped:
            if self._on_time is not None:
                self._on_time()
            self._system.wait_for(lambda: self._is_stopped or bool(self._ended()), self._every_s)
            for descriptor in [] if self._is_stopped else self._ended():
                del self._watched[descriptor]
                self._on_hangup(descriptor)
        self._has_ended = True
        self._system.changed.notify()

    def _ended(self) -> list[int]:
        return [descriptor for descriptor, process in self._watched.items() if process.has_ended]
