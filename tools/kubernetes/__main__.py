"""`python -m tools.kubernetes up`: a cluster on this machine until Ctrl-C. Prints what to export first."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
from pathlib import Path

from tools.kubernetes.cluster import RUNTIMES, running_cluster, timed_print
from tools.kubernetes.control_plane import ControlPlane, running_control_plane


async def serve(plane: ControlPlane, folder: Path, mode: str, num_nodes: int) -> None:
    """Run until SIGINT or SIGTERM."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with running_cluster(plane, folder, timed_print(), mode, num_nodes):
        print(f"export KUBECONFIG={plane.kubeconfig}", flush=True)
        await stop.wait()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.kubernetes", description=__doc__)
    parser.add_argument("verb", choices=["up"])
    parser.add_argument("--pods", choices=list(RUNTIMES), default="instant", help="what a pod is")
    parser.add_argument("--nodes", type=int, default=2)
    options = parser.parse_args()
    with running_control_plane() as plane, tempfile.TemporaryDirectory(prefix="tandem-pods-") as folder:
        asyncio.run(serve(plane, Path(folder), options.pods, options.nodes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
