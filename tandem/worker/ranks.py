"""The ranks of a worker: started before its engine, which has them formed anew when one of them ends."""

import os

from tandem.architecture.stages import check_group
from tandem.core.config import EngineConfig
from tandem.engine.async_engine import AsyncEngine
from tandem.engine.engine import Engine
from tandem.ranks.group import RankGroup, share_of
from tandem.rpc.rank_messages import RankReport
from tandem.worker.moves import refuse_moves_of_ranks
from tandem.worker.settings import WorkerSettings


def open_ranks(settings: WorkerSettings) -> tuple[EngineConfig, RankGroup | None]:
    """The engine's configuration, and the group that it leads; None = it computes everything itself.

    Raises:
        ConfigurationError: a setting cannot be honoured with several ranks.
    """
    refuse_moves_of_ranks(settings)
    config = settings.engine_config()
    check_group(settings.tp, settings.pp)
    if settings.num_ranks == 1:
        return config, None
    config = share_of(config, settings.num_ranks)
    return config, RankGroup(config, settings.num_ranks, num_stages=settings.pp)


def report_of(group: RankGroup | None) -> RankReport | None:
    """Its processes now, and how even the work of experts was; None = there is no group."""
    if group is None:
        return None
    pids, rows = (os.getpid(), *group.process_ids.values()), group.expert_rows
    stages = group.stages if group.links.num_stages > 1 else ()
    return RankReport(pids, group.num_epochs, rows if rows.busiest else None, stages)


def recover_from(group: RankGroup, engine: AsyncEngine) -> None:
    """The engine recovers as soon as a rank is lost, also while it has no work."""

    def check(_: Engine) -> None:
        group.check()

    group.on_lost = lambda: engine.post(check)
    engine.post(check)  # NOTE: it may have ended before
