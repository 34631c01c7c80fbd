"""Life cycle of the process on a further machine of a worker whose ranks are on several (`--hosts`).

It joins the worker's leader, starts ranks here, which compute steps for it, and joins again when that leader has ended
or is lost. A signal has it ask the leader to drain the whole worker; it ends when that leader has ended, or at once if
it has joined none.
"""

import asyncio
import contextlib
import signal

from prometheus_client import CollectorRegistry

from tandem.process.signals import exit_when_told
from tandem.ranks.host import RankHost
from tandem.ranks.rendezvous import own_release
from tandem.telemetry.log import configure_logging
from tandem.telemetry.metrics_server import serve_metrics
from tandem.worker.host_settings import RankHostSettings
from tandem.worker.ranks import proof_of


def run_rank_host(settings: RankHostSettings) -> int:
    """Serves leaders, one after the other, until SIGTERM or SIGINT, see the module; returns the exit code, 0."""
    configure_logging(settings.log_level, settings.log_format, "rank-host")
    return asyncio.run(_run(settings))


async def _run(settings: RankHostSettings) -> int:
    """Serves until a signal. NOTE: before it has joined a worker, it ends at once."""
    exit_when_told()
    credentials = settings.own_credentials()
    release, endpoint = await asyncio.to_thread(own_release), settings.endpoint(credentials)
    host = RankHost(settings.leader_address, proof_of(credentials), release, endpoint)

    def health() -> tuple[int, dict[str, object]]:
        return (200 if host.has_joined else 503), {"status": "joined" if host.has_joined else "joining"}

    async with contextlib.AsyncExitStack() as opened:
        if settings.metrics_port is not None:
            server = await serve_metrics(CollectorRegistry(), settings.host, settings.metrics_port, health)
            opened.push_async_callback(server.close)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, host.leave)
        await asyncio.to_thread(host.serve)
    return 0
