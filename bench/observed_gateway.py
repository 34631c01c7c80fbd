"""A gateway's process that also reports on its own memory: a line of JSON on stdout for each line on stdin.

    python -m bench.observed_gateway GATEWAY-FLAGS

A report has the objects that the garbage collector tracks, by type, the C library's heap as `mallinfo2` counts it, and
with TANDEM_BENCH_TRACEMALLOC=N the source lines that allocated most since the first report, N frames deep. What was
frozen at the gateway's start is not counted.
"""

import ctypes
import gc
import json
import os
import sys
import threading
import tracemalloc
from collections import Counter
from typing import Any

from tandem.gateway.server import run_gateway
from tandem.gateway.settings import GatewaySettings
from tandem.process.command import run_command

TRACED = "TANDEM_BENCH_TRACEMALLOC"
_NUM_TYPES = 40
_NUM_LINES = 25


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and newer; of all arenas."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


def _heap() -> dict[str, int]:
    """Bytes from the system, in use, free, and in maps of their own."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return {}
    library.mallinfo2.restype = _MallInfo
    info = library.mallinfo2()
    return {
        "heap_bytes": info.arena,
        "used_bytes": info.uordblks,
        "free_bytes": info.fordblks,
        "mapped_bytes": info.hblkhd,
    }


class _Reporter:
    """Answers in a thread of its own, so that a busy event loop does not delay it."""

    def __init__(self) -> None:
        self._first: tracemalloc.Snapshot | None = None
        if TRACED in os.environ:
            tracemalloc.start(int(os.environ[TRACED]))

    def run(self) -> None:
        for _ in sys.stdin:
            sys.stdout.write(json.dumps(self._report()) + "\n")
            sys.stdout.flush()

    def _report(self) -> dict[str, Any]:
        types = Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())
        found = {"num_objects": types.total(), "types": dict(types.most_common(_NUM_TYPES)), "heap": _heap()}
        found["num_tasks"] = types["_asyncio.Task"]
        return found | ({"lines": self._lines()} if tracemalloc.is_tracing() else {})

    def _lines(self) -> list[str]:
        snapshot = tracemalloc.take_snapshot()
        if self._first is None:
            self._first = snapshot
        grown = snapshot.compare_to(self._first, "traceback" if tracemalloc.get_traceback_limit() > 1 else "lineno")
        return ["\n".join((str(each), *each.traceback.format())) for each in grown[:_NUM_LINES]]


if __name__ == "__main__":
    threading.Thread(target=_Reporter().run, name="reports", daemon=True).start()
    sys.exit(run_command(GatewaySettings, sys.argv[1:], run_gateway))
