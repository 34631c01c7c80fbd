"""Reads of a pool that lies on several hosts."""

from dataclasses import replace

import pytest

from tandem.core.errors import TransportError
from tandem.transport.card import Identity
from tandem.transport.tcp.transport import TcpTransport
from tandem.transport.transfer import TransferState
from tests.helpers.secret import SECRET
from tests.helpers.transport_pools import COMPATIBILITY, pool_of, seeded_pages, wait_over

NUM_BLOCKS, PAGE_BYTES = 16, 4096


def test_a_read_that_one_host_refuses_is_over_when_that_of_the_other_is() -> None:
    """Regression: what had begun at the first host wrote on, and its blocks were thought to be free."""
    identity = Identity(COMPATIBILITY, SECRET)
    whole = pool_of(seeded_pages(1, NUM_BLOCKS, PAGE_BYTES), num_ranks=2)
    hosts = [TcpTransport(replace(whole, num_hosts=2, host=host), identity) for host in range(2)]
    reader = TcpTransport(
        pool_of(seeded_pages(2, NUM_BLOCKS, PAGE_BYTES), num_ranks=2), Identity(COMPATIBILITY, SECRET)
    )
    peer = reader.connect(hosts[0].card_of([host.address for host in hosts]))
    first, second = 1, NUM_BLOCKS // 2 + 1
    assert reader.read(peer, [first, second], [first, second]).wait(10)
    reader._peers.get(peer).hosts[1].queue.close()
    transfer = reader.read(peer, [first, second], [first, second])
    assert wait_over(transfer, 10)
    assert (transfer.state, str(transfer.error)) == (TransferState.FAILED, "the peer was disconnected")
    with pytest.raises(TransportError, match="the peer was disconnected"):
        reader.read(peer, [second], [second])
    for each in (reader, *hosts):
        each.close()
