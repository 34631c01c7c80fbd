"""Speed of moving KV blocks: memcpy and raw NIXL as what is possible, and our transports, in one run.

    python -m bench.transfer [--megabytes 128] [--rounds 9] [--save]

Sources are processes of their own, but for inproc and memcpy. Systems take turns in every round, so that what disturbs
the machine disturbs all of them; the rate is the best of the rounds, as a path has a limit and not an average.
"""

import argparse
import base64
import ctypes
import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.report import Report, Row
from tandem.core.errors import TransportError
from tandem.transport.base import KVTransport, MemoryPool, Peer
from tandem.transport.blocks import plan_read
from tandem.transport.card import Identity, unseal
from tandem.transport.cma import CmaTransport
from tandem.transport.inproc import InprocRegistry, InprocTransport
from tandem.transport.nixl.agent import AgentAddress, NixlAgent
from tandem.transport.nixl.bindings import unavailable_reason
from tandem.transport.nixl.transport import NixlTransport
from tandem.transport.tcp.transport import TcpConfig, TcpTransport
from tandem.transport.transfer import TransferState

PAGE_KIB = (16, 64, 256, 1024)
LATENCY_READS = 100
COMPATIBILITY = {"bench": "transfer"}
SECRET = b"shared by both sides"  # NOTE: their pools hold nothing but test data
Pages = NDArray[np.uint8]
Blocks = Sequence[int]
Read = Callable[[Blocks, Blocks], None]


def new_pages(num_blocks: int, page_bytes: int) -> Pages:
    """[num_blocks, page_bytes], every page touched, so that no page fault is measured."""
    return np.full((num_blocks, page_bytes), 7, dtype=np.uint8)


def pool_of(pages: Pages) -> MemoryPool:
    return MemoryPool(pages.ctypes.data, pages.shape[1], pages.shape[0], "cpu", pages)


@dataclass(frozen=True)
class Shape:
    """One size of pool."""

    page_bytes: int
    num_blocks: int


def serve(name: str, shape: Shape) -> None:
    """Be a source until standard input ends; print its card."""
    transport = build(name, pool_of(new_pages(shape.num_blocks, shape.page_bytes)))
    print(transport.card().hex(), flush=True)
    sys.stdin.read()
    transport.close()


def build(name: str, pool: MemoryPool) -> KVTransport:
    """A transport that reads from other processes."""
    makers: Mapping[str, Callable[[], KVTransport]] = {
        "tcp": lambda: TcpTransport(pool, Identity(COMPATIBILITY, SECRET)),
        "tcp, 2 streams": lambda: TcpTransport(pool, Identity(COMPATIBILITY, SECRET), TcpConfig(num_streams=2)),
        "cma": lambda: CmaTransport(pool, Identity(COMPATIBILITY, SECRET)),
        "nixl": lambda: NixlTransport(pool, Identity(COMPATIBILITY, SECRET)),
    }
    return makers[name]()


@contextmanager
def source(name: str, shape: Shape) -> Iterator[bytes]:
    """The card of a source process."""
    command = [sys.executable, "-m", "bench.transfer", "--serve", name, json.dumps(dataclasses.asdict(shape))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ.copy())
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        yield bytes.fromhex(process.stdout.readline().decode())
        process.stdin.close()
        process.wait()


def reader(transport: KVTransport, peer: Peer) -> Read:
    """One read, waited for."""

    def read(remote_blocks: Blocks, local_blocks: Blocks) -> None:
        transfer = transport.read(peer, remote_blocks, local_blocks, 60.0)
        transfer.wait()
        if transfer.state is not TransferState.DONE:
            raise TransportError(str(transfer.error))

    return read


def memcpy_system(shape: Shape) -> Read:
    """Runs copied by libc in this thread."""
    ours, theirs = (new_pages(shape.num_blocks, shape.page_bytes) for _ in range(2))
    page = shape.page_bytes

    def read(remote_blocks: Blocks, local_blocks: Blocks) -> None:
        for run in plan_read(remote_blocks, local_blocks, shape.num_blocks, shape.num_blocks):
            target, origin = ours.ctypes.data + run.local * page, theirs.ctypes.data + run.remote * page
            ctypes.memmove(target, origin, run.num_blocks * page)

    return read


def raw_nixl_system(shape: Shape, card: bytes, stack: ExitStack) -> Read:
    """NIXL's own calls from this thread, polling without pause."""
    pages = new_pages(shape.num_blocks, shape.page_bytes)
    agent = NixlAgent(pool_of(pages), bytes(16), "127.0.0.1")
    stack.callback(lambda kept: agent.destroy(), pages)
    fields = json.loads(unseal(card, Identity({}, SECRET)).metadata)
    address = AgentAddress.from_fields(fields)
    remote = agent.add_remote(address.name, base64.b64decode(fields["metadata"]), address.pool, address.identity)

    def read(remote_blocks: Blocks, local_blocks: Blocks) -> None:
        order = np.argsort(remote_blocks)
        handle = agent.read_blocks(remote, np.asarray(remote_blocks)[order], np.asarray(local_blocks)[order])
        while not agent.is_done(handle):
            pass
        agent.release(handle)

    return read


def inproc_system(shape: Shape, stack: ExitStack) -> Read:
    registry = InprocRegistry()
    pools = [pool_of(new_pages(shape.num_blocks, shape.page_bytes)) for _ in range(2)]
    ours, theirs = (InprocTransport(pool, Identity(COMPATIBILITY, SECRET), registry) for pool in pools)
    stack.callback(theirs.close)
    stack.callback(ours.close)
    return reader(ours, ours.connect(theirs.card()))


def process_system(name: str, shape: Shape, stack: ExitStack) -> tuple[Read, bytes]:
    card = stack.enter_context(source(name, shape))
    transport = build(name, pool_of(new_pages(shape.num_blocks, shape.page_bytes)))
    stack.callback(transport.close)
    return reader(transport, transport.connect(card)), card


def systems(shape: Shape, stack: ExitStack) -> dict[str, Read]:
    """Everything that is compared, by name; NIXL only where it is installed."""
    found = {"memcpy": memcpy_system(shape), "inproc": inproc_system(shape, stack)}
    for name in ("cma", "tcp", "tcp, 2 streams"):
        found[name], _ = process_system(name, shape, stack)
    if unavailable_reason() is None:
        found["nixl"], card = process_system("nixl", shape, stack)
        found["raw nixl"] = raw_nixl_system(shape, card, stack)
    return found


def patterns(num_blocks: int) -> dict[str, tuple[Blocks, Blocks]]:
    order = random.Random(0)
    blocks = list(range(1, num_blocks))
    return {
        "contiguous": (blocks, blocks),
        "scattered": (order.sample(blocks, len(blocks)), order.sample(blocks, len(blocks))),
    }


def timed(read: Read, remote_blocks: Blocks, local_blocks: Blocks) -> float:
    started_s = time.perf_counter()
    read(remote_blocks, local_blocks)
    return time.perf_counter() - started_s


def measure(shape: Shape, rounds: int) -> list[Row]:
    """Rates of whole-pool reads and the latency of one block, for every system at one block size."""
    rows = []
    label = f"{shape.page_bytes // 1024} KiB"
    with ExitStack() as stack:
        found = systems(shape, stack)
        for pattern, (remote_blocks, local_blocks) in patterns(shape.num_blocks).items():
            for read in found.values():
                read(remote_blocks, local_blocks)
            num_bytes = len(remote_blocks) * shape.page_bytes
            rates: dict[str, list[float]] = {name: [] for name in found}
            for _ in range(rounds):
                for name, read in found.items():
                    rates[name].append(num_bytes / timed(read, remote_blocks, local_blocks) / 1e9)
            rows += rate_rows(f"{label}, {pattern}", rates)
        for name, read in found.items():
            samples = tuple(timed(read, [1], [2]) * 1e6 for _ in range(LATENCY_READS))
            rows.append(Row(f"{label}, one block", name, "latency p50", statistics.median(samples), "us"))
    return rows


def rate_rows(workload: str, rates: Mapping[str, Sequence[float]]) -> list[Row]:
    """The floor of nixl is raw NIXL; of everything else, memcpy."""
    best = {name: max(samples) for name, samples in rates.items()}
    rows = []
    for name, value in best.items():
        floor = best["raw nixl"] if name == "nixl" else best["memcpy"]
        rows.append(Row(workload, name, "rate", value, "GB/s", floor, value / floor, tuple(rates[name])))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=128, help="size of each pool, in units of 1,048,576 bytes")
    parser.add_argument("--rounds", type=int, default=9, help="times that every system is measured")
    parser.add_argument("--save", action="store_true", help="keep the JSON under bench/results")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve[0], Shape(**json.loads(arguments.serve[1])))
        return
    rows: list[Row] = []
    for kib in PAGE_KIB:
        rows += measure(Shape(kib << 10, (arguments.megabytes << 10) // kib), arguments.rounds)
    reason = unavailable_reason()
    report = Report(
        "transfer",
        {"megabytes": arguments.megabytes, "rounds": arguments.rounds},
        rows,
        notes=[f"left out nixl: {reason}"] if reason else [],
    )
    report.print()
    if arguments.save:
        report.save()


if __name__ == "__main__":
    main()
