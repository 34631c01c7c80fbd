"""Process of a rank other than the leader: `python -m tandem.ranks.rank SOCKET MEMORY KV_MEMORY`.

The arguments are descriptors inherited from the process that starts it. It loads its part of the model, computes every
step that it is sent, and ends when its leader has: it neither listens nor connects.
"""

import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Protocol

from tandem.compute.collectives import RankLinks
from tandem.compute.native.links import SharedLinks
from tandem.core.config import EngineConfig
from tandem.core.errors import TandemError
from tandem.engine.ranks import LoadedShard, load_shard
from tandem.ranks.hangup import watch_for_hangup
from tandem.ranks.heartbeat import BEAT_S, LoadProgress
from tandem.ranks.messages import Begin, Loaded, Prepare, Prepared, Refused, Step, pack, unpack
from tandem.ranks.system import GroupLinks

EXIT_REFUSED, EXIT_LOST = 1, 70  # EX_SOFTWARE of sysexits.h

_log = logging.getLogger("tandem.ranks")


class LeaderSocket(Protocol):
    """Connection to the leader; the methods of `multiprocessing`'s `Connection` that are used."""

    def send_bytes(self, data: bytes, /) -> None: ...

    def recv_bytes(self) -> bytes: ...


def run(
    leader: LeaderSocket,
    open_links: Callable[[Begin], GroupLinks],
    load: Callable[[EngineConfig, RankLinks], LoadedShard],
    kv_memory: int,
    on_ready: Callable[[], None],
) -> int:
    """Serves the leader's messages. Returns an exit code if it refuses to serve or loses another rank.

    Args:
        open_links: opens the exchanges; from then on the rank sends heartbeats.
        on_ready: called when steps can come.

    Raises:
        EOFError, OSError: the leader has ended.
    """
    begin = unpack(leader.recv_bytes())
    assert isinstance(begin, Begin)
    try:
        shared = open_links(begin)
        shard = load(begin.config, shared.links)
    except TandemError as error:
        leader.send_bytes(pack(Refused(begin.epoch, str(error))))
        return EXIT_REFUSED
    leader.send_bytes(pack(Loaded(begin.epoch, shard.fingerprint)))
    prepare = unpack(leader.recv_bytes())
    assert isinstance(prepare, Prepare)
    runner = shard.runner(prepare.sizes, kv_memory, prepare.keeps_pages)
    on_ready()
    leader.send_bytes(pack(Prepared(begin.epoch)))
    while True:
        step = unpack(leader.recv_bytes())
        assert isinstance(step, Step)
        shared.begin_step(step.number)
        try:
            runner.run(step.work)
        except TandemError as error:
            _log.critical("ends: %s", error)
            return EXIT_LOST


def _beat(shared: GroupLinks, is_loading: threading.Event) -> None:
    """Sends the leader heartbeats for as long as this process runs, but none while loading has stalled."""
    progress = LoadProgress(time.monotonic())
    while True:
        others_s = time.process_time() - time.thread_time()
        if not (progress.has_stalled(others_s, time.monotonic()) and is_loading.is_set()):
            shared.beat()
        time.sleep(BEAT_S)


def main() -> int:
    """Runs the process. NOTE: it ignores a terminal's signals, which all processes get, and ends when its leader has
    drained.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    socket, memory, kv_memory = map(int, sys.argv[1:])
    is_loading = threading.Event()

    def open_links(begin: Begin) -> GroupLinks:
        logging.basicConfig(level=begin.log_level, format=f"rank {begin.rank}: %(message)s")
        sizes = begin.rank, begin.num_ranks, begin.num_stages
        shared = SharedLinks(memory, *sizes, deadline_s=begin.deadline_s, num_contexts=begin.num_contexts)
        os.close(memory)
        is_loading.set()
        threading.Thread(target=_beat, args=(shared, is_loading), name="tandem-beat", daemon=True).start()
        return shared

    def load(config: EngineConfig, links: RankLinks) -> LoadedShard:
        shard = load_shard(config, links)
        is_loading.clear()
        return shard

    def settle() -> None:
        os.close(kv_memory)
        gc.collect()
        gc.freeze()

    watch_for_hangup([socket], lambda _: os._exit(0))  # NOTE: it may be in an exchange then
    try:
        return run(Connection(socket), open_links, load, kv_memory, settle)
    except (EOFError, ConnectionError):
        return 0


if __name__ == "__main__":
    sys.exit(main())
