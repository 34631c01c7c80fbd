"""KV of a further host is readable by workers of its deployment, and by nobody else who has the cluster's secret."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from tandem.compute import shared_pages
from tandem.core.errors import TransportError
from tandem.ranks.host_kv import HostKV, KVEndpoint
from tandem.ranks.kv_messages import Failed, KVAnswer, OpenPool, PoolOpened
from tandem.tls.authority import Authority
from tandem.tls.files import TlsFiles
from tandem.tls.identity import CertifiedRole
from tandem.transport.card import Identity, accept, describe, seal
from tandem.transport.tcp import server as tcp_server
from tandem.transport.tcp.client import Address, open_connection
from tests.helpers.secret import SECRET
from tests.helpers.transport_pools import COMPATIBILITY, pool_of, seeded_pages

PAGE_BYTES, NUM_BLOCKS = 4096, 8
OURS = Authority("chat.default")


@pytest.fixture
def address(tmp_path: Path) -> Iterator[Address]:
    """Address at which a host with our certificate serves its part of a worker's KV."""
    answers: SimpleQueue[KVAnswer] = SimpleQueue()
    memory = shared_pages.make_memory()
    shared_pages.set_size(memory, 2 * NUM_BLOCKS * PAGE_BYTES)
    OURS.write(tmp_path / "host", CertifiedRole.WORKER)
    files = TlsFiles(tmp_path / "host", CertifiedRole.WORKER)
    kv = HostKV(KVEndpoint(SECRET, tls=files), memory, lambda _, answer: answers.put(answer))
    kv.take(1, OpenPool(identity().incarnation, COMPATIBILITY, PAGE_BYTES, 2 * NUM_BLOCKS, 2, None, (), 2, 1))
    opened = answers.get(timeout=10)
    assert isinstance(opened, PoolOpened)
    yield Address(opened.host, opened.port)
    kv.close()
    os.close(memory)


def identity() -> Identity:
    return Identity(COMPATIBILITY, SECRET, "ab" * 16)


def meets(address: Address, tls: TlsFiles | None) -> None:
    """The handshake of a reader that knows the secret and what the worker's card says. Raises TransportError."""
    pool = pool_of(seeded_pages(1, 2 * NUM_BLOCKS, PAGE_BYTES), num_ranks=2)
    card = seal(describe("tcp", identity(), pool, b""), identity())
    reader = Identity(COMPATIBILITY, SECRET)
    open_connection(address, accept(card, "tcp", reader, pool), reader, lambda: None, tls=tls).close()


def test_a_worker_of_the_deployment_is_let_in(address: Address, tmp_path: Path) -> None:
    OURS.write(tmp_path / "reader", CertifiedRole.WORKER)
    meets(address, TlsFiles(tmp_path / "reader", CertifiedRole.WORKER))


@pytest.mark.parametrize(
    "certified",
    [
        lambda folder: None,
        lambda folder: written(folder, Authority("chat.default"), CertifiedRole.WORKER),
        lambda folder: written(folder, OURS, CertifiedRole.ROUTER),
    ],
    ids=["plain text", "another authority", "another role"],
)
def test_others_are_not_although_they_have_the_secret(
    address: Address, certified: Callable[[Path], TlsFiles | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_server, "HANDSHAKE_S", 0.2)
    with pytest.raises(TransportError):
        meets(address, certified(tmp_path / "other"))


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyError(3), MemoryError()])
def test_every_call_is_answered(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: after an error that it did not expect, the leader waited until its timeout."""

    def fail(*_: object) -> None:
        raise error

    answers: SimpleQueue[KVAnswer] = SimpleQueue()
    monkeypatch.setattr(shared_pages, "map_pages", fail)
    memory = shared_pages.make_memory()
    shared_pages.set_size(memory, 2 * NUM_BLOCKS * PAGE_BYTES)
    kv = HostKV(KVEndpoint(SECRET), memory, lambda _, answer: answers.put(answer))
    kv.take(1, OpenPool(identity().incarnation, COMPATIBILITY, PAGE_BYTES, 2 * NUM_BLOCKS, 2, None, (), 2, 1))
    assert answers.get(timeout=10) == Failed(f"{type(error).__name__}: {error}")
    kv.close()
    os.close(memory)


def written(folder: Path, authority: Authority, role: CertifiedRole) -> TlsFiles:
    authority.write(folder, role)
    return TlsFiles(folder, role)
