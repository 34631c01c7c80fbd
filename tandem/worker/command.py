"""Starts a worker. Imports PyTorch and the transports only here, once the settings are known to be right."""

import os

from tandem.worker.host_settings import RankHostSettings
from tandem.worker.settings import WorkerSettings


def serve_worker(settings: WorkerSettings) -> int:
    """Serve until SIGTERM or SIGINT, then drain; returns the exit code."""
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    from tandem.worker.process import run_worker

    return run_worker(settings)


def serve_rank_host(settings: RankHostSettings) -> int:
    """Serve a worker's leader until told to stop and it has drained; returns the exit code."""
    from tandem.worker.rank_host import run_rank_host

    return run_rank_host(settings)
