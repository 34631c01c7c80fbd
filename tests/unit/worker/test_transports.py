"""The transports of one worker together."""

import socket

import pytest
import torch

from tandem.core.errors import ConfigurationError, TransportError
from tandem.transport.base import MemoryPool
from tandem.transport.card import Identity
from tandem.transport.inproc import InprocRegistry
from tandem.transport.nixl.bindings import unavailable_reason
from tandem.worker.transports import Transports
from tests.helpers.secret import SECRET


def pool() -> MemoryPool:
    pages = torch.zeros(4, 64, dtype=torch.uint8)
    return MemoryPool(pages.data_ptr(), 64, 4, "cpu", pages)


def test_nixl_is_left_alone_where_it_serves_nobody() -> None:
    """It was opened everywhere, and with it a port that took writes into the pool from all who connected."""
    transports = Transports(pool(), Identity({"a": "b"}, SECRET))
    assert set(transports.cards) == {"cma", "tcp"}
    transports.close()


@pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))
def test_nixl_is_opened_for_rdma_devices_or_when_asked_for() -> None:
    with_rdma = Transports(pool(), Identity({"a": "b"}, SECRET), has_rdma=True)
    assert set(with_rdma.cards) == {"cma", "nixl", "tcp"}
    with_rdma.close()
    asked_for = Transports(pool(), Identity({"a": "b"}, SECRET), wanted="nixl")
    assert set(asked_for.cards) == {"nixl"}
    asked_for.close()


def test_a_port_that_was_named_is_listened_at_or_refused() -> None:
    """Network policies may open that port alone: nobody could read the blocks of a worker at another one."""
    identity = Identity({"a": "b"}, SECRET)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1:{port}"):
            Transports(pool(), identity, kv_port=port)
    transports = Transports(pool(), identity, kv_port=port)
    with socket.create_connection(("127.0.0.1", port), timeout=10):
        pass
    transports.close()


def test_a_transport_without_a_card_takes_no_other_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL has none while its agent cannot be built again after a fence; peers could not even greet the worker then."""
    transports = Transports(pool(), Identity({"a": "b"}, SECRET), registry=InprocRegistry())
    names = list(transports.cards)
    assert {"inproc", "tcp"} <= set(names)

    def no_card() -> bytes:
        raise TransportError("no agent")

    monkeypatch.setattr(transports.get("inproc"), "card", no_card)
    assert list(transports.cards) == [name for name in names if name != "inproc"]
    monkeypatch.undo()
    assert list(transports.cards) == names
    transports.close()
