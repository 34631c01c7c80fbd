"""Starts a worker. Imports PyTorch and the transports only here, once the settings are known to be right."""

import os

from tandem.worker.settings import WorkerSettings


def serve_worker(settings: WorkerSettings) -> int:
    """Serve until SIGTERM or SIGINT, then drain; returns the exit code."""
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    from tandem.worker.process import run_worker

    return run_worker(settings)
