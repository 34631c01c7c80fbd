"""A worker's process and a stranger on its machine, who connects to all it listens at and knows every wire."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from tandem.transport.card import Identity
from tandem.transport.nixl.bindings import unavailable_reason
from tests.helpers.stranger import PATTERN, bound_names, intrude, listening, packets, spam, writes
from tests.helpers.transport_pools import pool_of, seeded_pages
from tests.helpers.transport_process import ROOT, SourceSpec, build_transport

SECRET = "a secret that no stranger has"
NEEDLE_BYTES = 16
SERVING = """
import asyncio, json, sys
from pathlib import Path
from tandem.worker.process import serving_worker
from tandem.worker.settings import DecodeSettings
from tests.helpers.transport_pools import seeded_pages
from tests.helpers.workers import settings_of

async def main():
    path, transport, secret = sys.argv[1:]
    settings = settings_of(
        DecodeSettings, Path(path), "d0", transport=transport, metrics_port=0, cluster_secret=secret
    )
    async with serving_worker(settings) as worker:
        core = worker.core
        pages = core.checksums._pages.pages[0].numpy()
        pages[:] = seeded_pages(1, *pages.shape)
        said = {
            "address": pages.ctypes.data,
            "num_blocks": pages.shape[0],
            "page_bytes": pages.shape[1],
            "metrics_port": worker.metrics_port,
            "compatibility": core.compatibility,
            "cards": {name: card.hex() for name, card in core.transports.cards.items()},
        }
        print(json.dumps(said), flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""


@dataclass(frozen=True)
class Victim:
    """A worker that serves. `said`: where its pool is, and what it tells peers that have the secret."""

    process: psutil.Process
    said: dict[str, Any]

    @property
    def pages(self) -> bytes:
        """Its pool, the null block included, as the kernel shows it to us."""
        with open(f"/proc/{self.process.pid}/mem", "rb", buffering=0) as memory:
            memory.seek(self.said["address"])
            return memory.read(self.said["num_blocks"] * self.said["page_bytes"])

    def targets(self) -> list[int]:
        """Addresses in the null block, in the first, another and the last one."""
        page = self.said["page_bytes"]
        return [self.said["address"] + block * page + page // 2 for block in (0, 1, 5, self.said["num_blocks"] - 1)]

    def is_healthy(self) -> bool:
        return httpx.get(f"http://127.0.0.1:{self.said['metrics_port']}/health", trust_env=False).status_code == 200

    def expect_readable(self, transport: str) -> None:
        """By a peer that has the secret: all blocks, exactly."""
        num_blocks, page_bytes = self.said["num_blocks"], self.said["page_bytes"]
        pages = np.zeros((num_blocks, page_bytes), dtype=np.uint8)
        identity = Identity(self.said["compatibility"], secret=SECRET.encode())
        reader = build_transport(SourceSpec(transport), pool_of(pages), identity)
        blocks = range(1, num_blocks)
        transfer = reader.read(reader.connect(bytes.fromhex(self.said["cards"][transport])), blocks, blocks)
        assert transfer.wait(20)
        reader.close()
        assert transfer.error is None
        assert np.array_equal(pages[1:], seeded_pages(1, num_blocks, page_bytes)[1:])


@contextmanager
def victim_of(model: Path, transport: str, **variables: str) -> Iterator[Victim]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("UCX_", "TANDEM_"))}
    process = subprocess.Popen(
        [sys.executable, "-c", SERVING, str(model), transport, SECRET],
        env=environment | {"PYTHONPATH": str(ROOT)} | variables,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        try:
            yield Victim(psutil.Process(process.pid), json.loads(process.stdout.readline()))
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize("transport", ["auto", "nixl"])
def test_a_stranger_reads_nothing_changes_nothing_and_ends_nobody(llama: Path, transport: str) -> None:
    """UCX's port took one packet for a write to any address: it overwrote KV blocks, which no checksum of ours sees, or
    ended the worker. One empty datagram to UCX's Unix socket ended it too.
    """
    if transport == "nixl" and unavailable_reason() is not None:
        pytest.skip(str(unavailable_reason()))
    with victim_of(llama, transport) as victim:
        before = victim.pages
        assert before == seeded_pages(1, victim.said["num_blocks"], victim.said["page_bytes"]).tobytes()
        ports = listening(victim.process)
        assert len(ports) >= 2, "gRPC and metrics"
        received = intrude(ports, list(packets(victim.targets(), seed=3)))
        for name in bound_names(victim.process):
            spam(name)
        for name in victim.said["cards"]:
            victim.expect_readable(name)
        for name in bound_names(victim.process):
            spam(name)
        assert victim.is_healthy()
        assert victim.pages == before
        page = victim.said["page_bytes"]
        needles = [before[start : start + NEEDLE_BYTES] for start in range(0, len(before), page)]
        assert len(received) > 1000, "somebody spoke with the stranger"
        assert not any(needle in received for needle in needles)


@pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))
def test_the_same_stranger_writes_where_the_environment_opens_a_port(llama: Path) -> None:
    """Or the test above would pass by ignorance. The worker has warned of it."""
    with victim_of(llama, "nixl", UCX_TLS="tcp", UCX_NET_DEVICES="lo") as victim:
        (message,) = writes([victim.targets()[1]])
        with ExitStack() as opened:
            for port in listening(victim.process):
                opened.enter_context(socket.create_connection(port)).sendall(message)
            while PATTERN not in victim.pages:
                assert victim.process.status() != psutil.STATUS_ZOMBIE, "it wrote elsewhere"
