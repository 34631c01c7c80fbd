"""Identities of peers, which are read into rows that connections share."""

import pytest

from tandem.transport.card import Identity
from tandem.transport.nixl import transport as nixl
from tandem.transport.nixl.agent import NUM_PROBES
from tests.helpers.secret import SECRET
from tests.helpers.transport_pools import COMPATIBILITY, pool_of, seeded_pages
from tests.unit.transport.test_read_counts import CountingAgent


def test_a_row_is_not_given_to_another_connection_before_it_was_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it was free once read, so that another peer's identity could come to lie there first."""
    free: list[set[int]] = []

    class Watched(CountingAgent):
        def identity_read(self, probe: int) -> bytes:
            free.append({probe} & reader._probes)
            return super().identity_read(probe)

    monkeypatch.setattr(nixl, "NixlAgent", Watched)
    source, reader = (
        nixl.NixlTransport(pool_of(seeded_pages(seed, 4, 4096)), Identity(COMPATIBILITY, SECRET)) for seed in range(2)
    )
    reader.connect(source.card())
    assert free == [set()]
    assert len(reader._probes) == NUM_PROBES
    for each in (reader, source):
        each.close()
