"""The transports of one worker together."""

import pytest
import torch

from tandem.core.errors import TransportError
from tandem.transport.base import MemoryPool
from tandem.transport.card import Identity
from tandem.transport.inproc import InprocRegistry
from tandem.worker.transports import Transports
from tests.helpers.secret import SECRET


def test_a_transport_without_a_card_takes_no_other_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL has none while its agent cannot be built again after a fence; peers could not even greet the worker then."""
    pages = torch.zeros(4, 64, dtype=torch.uint8)
    pool = MemoryPool(pages.data_ptr(), 64, 4, "cpu", pages)
    transports = Transports(pool, Identity({"a": "b"}, SECRET), registry=InprocRegistry())
    names = list(transports.cards)
    assert {"inproc", "tcp"} <= set(names)

    def no_card() -> bytes:
        raise TransportError("no agent")

    monkeypatch.setattr(transports.get("inproc"), "card", no_card)
    assert list(transports.cards) == [name for name in names if name != "inproc"]
    monkeypatch.undo()
    assert list(transports.cards) == names
    transports.close()
