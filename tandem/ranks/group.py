"""The group of ranks of one worker, as its leader uses it: sends steps to the ranks, and replaces them when one is
lost.

Each time the group is formed begins an epoch with new processes. The KV memory of all ranks outlives an epoch: what
earlier steps have written stays. An *exchange* is an operation of all ranks of one stage and context, such as a sum.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from tandem.compute.collectives import RankLinks
from tandem.core.config import EngineConfig
from tandem.core.errors import RanksLostError
from tandem.core.expert_rows import ExpertRows
from tandem.core.machine import monotonic_s
from tandem.engine.executor import Executor, StepHandle
from tandem.engine.ranks import ShardSizes, await_kv
from tandem.engine.resolve import default_kv_cache_bytes
from tandem.ranks.epoch import Epoch
from tandem.ranks.host_group import HostGroup
from tandem.ranks.messages import Step
from tandem.ranks.rank_process import RankProcess
from tandem.ranks.remote import RemoteHost
from tandem.ranks.system import OwnSystem, RankSystem
from tandem.scheduler.output import SchedulerOutput

EXCHANGE_DEADLINE_S = 20.0  # after which a rank that does not take part is lost
MAX_FRUITLESS_EPOCHS = 3  # in a row without a computed step; then the group is given up

_log = logging.getLogger(__name__)


def share_of(config: EngineConfig, num_ranks: int) -> EngineConfig:
    """Configuration of each of `num_ranks` ranks of a host: its share of threads and KV memory, on the CPU."""
    num_threads = config.num_threads or torch.get_num_threads()
    kv_bytes = config.kv_cache_bytes or default_kv_cache_bytes(torch.device("cpu"))
    return replace(config, num_threads=max(1, num_threads // num_ranks), kv_cache_bytes=max(1, kv_bytes // num_ranks))


class RankGroup:
    """Implements `engine.ranks.Ranks`. Starts `num_ranks - 1` processes, which load their parts while the leader loads
    its own.

    Args:
        config: configuration of each rank, with its share of the host's threads and KV memory (`share_of`).
        num_ranks: in all stages and contexts together.
        num_stages: stages into which the model's layers are divided (pipeline); divides `num_ranks`.
        num_contexts: parts into which the tokens of prompts are divided in each stage; divides `num_ranks` too.
        deadline_s: the longest that an exchange within a stage and context, or a message to a rank, waits for it.
        hosts: joined hosts with ranks of the group, of whole stages if there are several; closed with the group.
            None = all ranks are on this host.
        system: starts ranks and makes memory on this host; None = the real one.

    `on_lost` is called on a thread of its own, at most once an epoch, when that has ended without `close`.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_ranks: int,
        *,
        num_stages: int = 1,
        num_contexts: int = 1,
        deadline_s: float = EXCHANGE_DEADLINE_S,
        hosts: HostGroup | None = None,
        system: RankSystem | None = None,
    ) -> None:
        self._config, self._deadline_s, self._hosts = config, deadline_s, hosts
        self._system: RankSystem = system or OwnSystem()
        self.other_hosts: Sequence[RemoteHost] = () if hosts is None else hosts.others
        self.num_ranks_here = num_ranks if hosts is None else hosts.place.num_here
        self._prepared: tuple[str, ShardSizes] | None = None
        self._num_fruitless = 0
        self._is_closed = False
        self.num_epochs = 1
        self.on_lost: Callable[[], None] | None = None
        self._kv_memory = self._system.make_kv_memory()
        memory = self._system.make_links_memory(num_ranks, num_stages * num_contexts)
        try:
            self._shared = self._system.open_links(memory, num_ranks, num_stages, num_contexts, deadline_s)
            self._epoch = self._begin(memory)
        finally:
            self._system.close(memory)

    @property
    def links(self) -> RankLinks:
        return self._shared.links

    @property
    def expert_rows(self) -> ExpertRows:
        """Rows computed so far by the experts of each rank in the leader's stage and context."""
        return self._shared.expert_rows

    @property
    def state_hosts(self) -> Sequence[RemoteHost]:
        """The other hosts, in the order of their parts of the KV memory."""
        return self.other_hosts if self.links.num_stages == 1 else self.other_hosts[::-1]

    @property
    def stages(self) -> tuple[int, ...]:
        """The stage of each rank, by rank."""
        return tuple(map(self._shared.stage_of, range(self._shared.num_ranks)))

    @property
    def contexts(self) -> tuple[int, ...]:
        """The context of each rank, by rank."""
        return tuple(map(self._shared.context_of, range(self._shared.num_ranks)))

    @property
    def process_ids(self) -> Mapping[int, int]:
        """Process id of each rank but the leader, on its host."""
        return self._epoch.process_ids

    @property
    def hosts(self) -> tuple[str, ...]:
        """Name of each rank's host; "" = the leader's."""
        return self._epoch.hosts

    @property
    def silent_s(self) -> tuple[float, ...]:
        """Seconds since each rank's last heartbeat; () = the group is being formed."""
        return self._epoch.silent_s

    def take_pages(self, num_parts: int, num_pages: int, page_bytes: int) -> torch.Tensor:
        pages = self._system.take_kv(self._kv_memory, num_parts, num_pages, page_bytes)
        if self._hosts is not None:
            self._hosts.set_kv_bytes(pages.nbytes)
        return pages

    def prepare(self, fingerprint: str, sizes: ShardSizes) -> None:
        self._prepared = fingerprint, sizes
        self._epoch.prepare(fingerprint, sizes, keeps_pages=False)

    def renew(self) -> None:
        """Forms the group anew after a loss, with new processes and the present KV; waits until it is ready.

        Raises `ConfigurationError` if it cannot be formed, `RanksLostError` if epochs keep ending without a step.
        """
        assert self._prepared is not None, "only a group that was formed is formed anew"
        began_s = monotonic_s()
        self._num_fruitless = 0 if self._epoch.num_steps else self._num_fruitless + 1
        self._epoch.close()
        if self._num_fruitless >= MAX_FRUITLESS_EPOCHS:
            raise RanksLostError(f"{self._num_fruitless} groups of ranks in a row have ended before their first step")
        self.num_epochs += 1
        memory = self._system.make_links_memory(self._shared.num_ranks, self._shared.num_sections)
        try:
            self._shared.open(memory)
            self._epoch = self._begin(memory)
        finally:
            self._system.close(memory)
        self._epoch.prepare(*self._prepared, keeps_pages=True)
        _log.warning("the group of ranks was formed anew in %.1f s, epoch %d", monotonic_s() - began_s, self.num_epochs)

    def lead(self, own: Executor) -> "RankedExecutor":
        return RankedExecutor(self, own)

    def begin_step(self, step: Step) -> None:
        """Sends a step to all other ranks.

        Raises:
            RanksLostError: the epoch has ended.
        """
        self._epoch.begin_step(step)

    def end_step(self) -> None:
        """Counts a step as computed. Raises `RanksLostError` if the epoch ended, so that a rank may not have computed
        it.
        """
        self._epoch.check()
        self._epoch.num_steps += 1

    def check(self) -> None:
        """Raises `RanksLostError` if the epoch has ended."""
        self._epoch.check()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._epoch.close()
        if self._hosts is not None:
            self._hosts.close()
        self._system.close(self._kv_memory)

    def _begin(self, memory: int) -> Epoch:
        """Starts the ranks of an epoch. NOTE: other hosts first: if one is lost this fails, and then no rank here needs
        ending.
        """
        ranks: dict[int, RankProcess] = {}
        if self._hosts is not None:
            ranks |= self._hosts.begin(self.num_epochs, memory)
        for rank in range(1, self.num_ranks_here):
            ranks[rank] = self._system.start_rank(memory, self._kv_memory, self._deadline_s)
        return Epoch(self._config, self._shared, ranks, self._deadline_s, self._tell_lost, self._system.watch)

    def _tell_lost(self) -> None:
        if self.on_lost is not None:
            self.on_lost()


class RankedExecutor:
    """An `Executor` of all ranks of a group: sends each step to the others, then computes the leader's part."""

    def __init__(self, group: RankGroup, own: Executor) -> None:
        self._group = group
        self._own = own
        self._num_steps = 0
        self._untold: tuple[str, ...] = ()

    def submit(self, step: SchedulerOutput) -> StepHandle:
        """Computes a step on all ranks. NOTE: requests released by a step that was lost may still be known to ranks, so
        the next step releases them again.
        """
        step = replace(step, released=(*self._untold, *step.released))
        self._untold = tuple(step.released)
        self._num_steps += 1
        self._group.begin_step(Step(self._num_steps, step))
        try:
            handle = self._own.submit(step)
            await_kv(step, self._group.links)
        except RanksLostError:
            self._group.check()  # NOTE: an exchange names whom it waited for, who may have waited for the lost one
            raise
        self._group.end_step()
        self._untold = ()
        return handle
