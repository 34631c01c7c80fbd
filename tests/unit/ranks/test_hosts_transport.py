"""Connections of a worker on several hosts to a peer: made by all hosts, or left by all."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from tandem.core.errors import TransportError
from tandem.ranks.hosts_transport import HostsTransport
from tandem.ranks.kv_messages import ConnectPeer, DisconnectPeer, Done, Failed, KVAnswer, KVCall, OpenPool, PoolOpened
from tandem.transport.card import Identity
from tandem.transport.tcp.transport import TcpTransport
from tests.helpers.secret import SECRET
from tests.helpers.transport_pools import COMPATIBILITY, pool_of, seeded_pages

NUM_BLOCKS, PAGE_BYTES, NUM_HOSTS = 12, 4096, 3


class Asked:
    """A further host that has opened its pool; the test answers its other calls."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[tuple[KVCall, Future[KVAnswer]]] = []
        self.was_asked = threading.Event()

    def ask(self, call: KVCall) -> "Future[KVAnswer]":
        answer: Future[KVAnswer] = Future()
        if isinstance(call, OpenPool):
            answer.set_result(PoolOpened("127.0.0.1", 1))
        else:
            self.calls.append((call, answer))
            self.was_asked.set()
        return answer

    def answer(self, answer: KVAnswer) -> None:
        self.calls[-1][1].set_result(answer)

    @property
    def kinds(self) -> list[type[Any]]:
        return [type(call) for call, _ in self.calls]


@pytest.fixture
def source() -> Iterator[TcpTransport]:
    made = TcpTransport(pool_of(seeded_pages(1, NUM_BLOCKS, PAGE_BYTES), NUM_HOSTS), Identity(COMPATIBILITY, SECRET))
    yield made
    made.close()


def test_a_host_that_connects_after_another_has_failed_is_disconnected_too(source: TcpTransport) -> None:
    """Regression: it was told to disconnect before it had connected, and kept a connection that nobody knew of."""
    identity = Identity(COMPATIBILITY, SECRET)
    pool = replace(pool_of(seeded_pages(2, NUM_BLOCKS, PAGE_BYTES), NUM_HOSTS), num_hosts=NUM_HOSTS)
    others: Any = [Asked("host 1"), Asked("host 2")]
    own = TcpTransport(pool, identity)
    with ThreadPoolExecutor(1) as threads:
        transport = HostsTransport(own, pool, identity, others)
        connecting = threads.submit(transport.connect, source.card())
        assert others[1].was_asked.wait(10)
        others[0].answer(Failed("no way there"))
        with pytest.raises(TransportError, match="host 1: no way there"):
            connecting.result(timeout=10)
    assert others[0].kinds == [ConnectPeer, DisconnectPeer]
    assert others[1].kinds == [ConnectPeer], "which it has not answered"
    others[1].answer(Done())
    assert others[1].kinds == [ConnectPeer, DisconnectPeer]
    assert {call.connection for other in others for call, _ in other.calls} == {1}
    own.close()
