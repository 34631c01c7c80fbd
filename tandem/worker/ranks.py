"""The ranks of a worker: started before its engine, which has them formed anew when one of them ends."""

import os

from tandem.core.config import EngineConfig
from tandem.engine.async_engine import AsyncEngine
from tandem.engine.engine import Engine
from tandem.ranks.group import RankGroup, share_of
from tandem.rpc.rank_messages import RankReport
from tandem.worker.settings import WorkerSettings


def open_ranks(settings: WorkerSettings) -> tuple[EngineConfig, RankGroup | None]:
    """The engine's configuration, and the group that it leads; None = it computes everything itself."""
    config = settings.engine_config()
    if settings.tp == 1:
        return config, None
    config = share_of(config, settings.tp)
    return config, RankGroup(config, settings.tp)


def report_of(group: RankGroup | None) -> RankReport | None:
    """Its processes now, and how even the work of experts was; None = there is no group."""
    if group is None:
        return None
    rows = group.collectives.expert_rows
    return RankReport((os.getpid(), *group.process_ids.values()), group.num_epochs, rows if rows.busiest else None)


def recover_from(group: RankGroup, engine: AsyncEngine) -> None:
    """The engine recovers as soon as a rank is lost, also while it has no work."""

    def check(_: Engine) -> None:
        group.check()

    group.on_lost = lambda: engine.post(check)
    engine.post(check)  # NOTE: it may have ended before
