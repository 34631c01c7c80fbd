"""Particulars of peers in one process: the source's memory can go away under the reader."""

import numpy as np
import pytest

from tandem.core.errors import ConfigurationError
from tandem.transport.base import MemoryPool
from tandem.transport.card import Identity
from tandem.transport.inproc import InprocRegistry, InprocTransport
from tests.helpers.secret import SECRET
from tests.helpers.transport_pools import COMPATIBILITY, pool_of, seeded_pages, wait_over

PAGE_BYTES = 8 << 20  # milliseconds to copy


def test_nobody_reads_a_pool_after_its_close_has_returned() -> None:
    registry = InprocRegistry()
    pages, source_pages = np.zeros((4, PAGE_BYTES), dtype=np.uint8), np.full((4, PAGE_BYTES), 17, dtype=np.uint8)
    reader = InprocTransport(pool_of(pages), Identity(COMPATIBILITY, SECRET), registry)
    source = InprocTransport(pool_of(source_pages), Identity(COMPATIBILITY, SECRET), registry)
    peer = reader.connect(source.card())
    transfers = [reader.read(peer, [1, 3], [3, 1]) for _ in range(50)]
    assert transfers[0].wait(10)
    source.close()
    source_pages[:] = 238
    assert all(wait_over(transfer, 10) for transfer in transfers)
    assert np.array_equal(np.unique(pages), [0, 17])
    assert "closed" in str(transfers[-1].error)
    reader.close()


def test_an_incarnation_registers_once() -> None:
    registry, identity, pool = InprocRegistry(), Identity(COMPATIBILITY, SECRET), pool_of(seeded_pages(0, 4, 64))
    first = InprocTransport(pool, identity, registry)
    with pytest.raises(ConfigurationError, match=identity.incarnation):
        InprocTransport(pool, identity, registry)
    first.close()
    InprocTransport(pool, identity, registry).close()


def test_a_gpu_pool_is_refused() -> None:
    pool = MemoryPool(4096, 64, 4, "cuda:1", None)
    with pytest.raises(ConfigurationError, match="cuda:1"):
        InprocTransport(pool, Identity(COMPATIBILITY, SECRET), InprocRegistry())
