"""Starts the ranks of a worker (processes that compute its model together) before its engine, and connects both."""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from tandem.architecture.stages import check_group
from tandem.compute.page_bytes import LocalPageBytes, PageBytes
from tandem.core.config import EngineConfig
from tandem.core.machine import process_id
from tandem.engine.async_engine import AsyncEngine
from tandem.engine.engine import Engine
from tandem.engine.resolve import Assembly
from tandem.process.cores import own_cpus
from tandem.ranks.group import RankGroup, share_of
from tandem.ranks.host_group import HostGroup
from tandem.ranks.hosts_page_bytes import HostsPageBytes
from tandem.ranks.remote import RemoteHost
from tandem.ranks.rendezvous import Proof
from tandem.ranks.system import RankSystem
from tandem.rpc.credentials import Credentials
from tandem.rpc.rank_messages import RankReport
from tandem.transport.base import MemoryPool
from tandem.worker.host_tier_check import check_host_tier
from tandem.worker.settings import WorkerSettings

_KEY_PURPOSE = "ranks"

_log = logging.getLogger(__name__)


def proof_of(credentials: Credentials) -> Proof:
    """Credentials with which the leader of a group and its other hosts authenticate each other."""
    return Proof(credentials.key(_KEY_PURPOSE), credentials.tls)


def open_ranks(
    settings: WorkerSettings,
    credentials: Credentials,
    on_leaving: Callable[[], None],
    system: RankSystem | None = None,
) -> tuple[EngineConfig, RankGroup | None]:
    """Returns the engine's configuration, and the group of ranks that it leads; None = the engine computes alone. Waits
    for other hosts if some ranks are there.

    Args:
        on_leaving: called, on a thread of its own, when one of the hosts is to be stopped.
        system: see `RankGroup`.

    Raises:
        ConfigurationError: a setting cannot be honoured with several hosts, or hosts have not joined in time.
        RanksLostError: a host that has joined is lost.
    """
    check_host_tier(settings)
    check_group(settings.tp, settings.pp, settings.cp)
    config = settings.engine_config()
    if settings.num_ranks == 1:
        return config, None
    num_here, num_cores = settings.num_ranks // settings.hosts, len(own_cpus())
    if num_here > num_cores:
        _log.warning(
            "%d ranks take turns on %d cores, and wait for each other in every layer: give this worker %d cores, or at "
            "most %d ranks by tp, pp and cp",
            *(num_here, num_cores, num_here, num_cores),
        )
    config = share_of(config, num_here)
    num_stages, num_contexts = settings.pp, settings.cp
    if settings.hosts == 1:
        return config, RankGroup(
            config, settings.num_ranks, num_stages=num_stages, num_contexts=num_contexts, system=system
        )
    hosts = HostGroup(
        settings.ranks_address,
        proof_of(credentials),
        settings.hosts,
        settings.num_ranks,
        num_stages=num_stages,
        num_contexts=num_contexts,
    )
    hosts.on_leaving = on_leaving
    with ExitStack() as opened:
        opened.callback(hosts.close)
        hosts.wait(settings.join_timeout_s)
        group = RankGroup(config, settings.num_ranks, num_stages=num_stages, num_contexts=num_contexts, hosts=hosts)
        opened.pop_all()
        return config, group


def page_bytes_of(assembly: Assembly, pool: MemoryPool, others: Sequence[RemoteHost]) -> PageBytes:
    """Access to the bytes of all ranks' KV pages, on all hosts, for checksums."""
    own = LocalPageBytes(assembly.pages.pages)
    return HostsPageBytes(own, pool, others) if others else own


def report_of(group: RankGroup | None) -> RankReport | None:
    """Report on a group: its processes now, and how evenly the work of experts was distributed; None = there is no
    group.
    """
    if group is None:
        return None
    rows = group.expert_rows
    return RankReport(
        pids=(process_id(), *(pid for _, pid in sorted(group.process_ids.items()))),
        num_epochs=group.num_epochs,
        experts=rows if rows.busiest else None,
        stages=group.stages if group.links.num_stages > 1 else (),
        contexts=group.contexts if group.links.num_contexts > 1 else (),
        hosts=group.hosts if group.other_hosts else (),
        silent_s=group.silent_s,
    )


def recover_from(group: RankGroup, engine: AsyncEngine) -> None:
    """Has the engine recover as soon as a rank is lost, also while it has no work."""

    def check(_: Engine) -> None:
        group.check()

    group.on_lost = lambda: engine.post(check)
    engine.post(check)  # NOTE: it may have ended before
