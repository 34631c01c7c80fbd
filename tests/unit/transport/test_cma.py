"""Reads of another process's memory: whom the kernel lets read, and whom the reader takes for its peer."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from tandem.core.errors import ConfigurationError, IncompatiblePeerError, TransportError
from tandem.transport.base import MemoryPool
from tandem.transport.card import Identity, seal, unseal
from tandem.transport.cma import CmaTransport
from tests.helpers.transport_pools import COMPATIBILITY, pool_of, seeded_pages
from tests.helpers.transport_process import ROOT, SourceProcess, SourceSpec

STRANGER = 65534  # nobody
SPEC = SourceSpec("cma", num_blocks=3000, page_bytes=64)
SECRET = bytes.fromhex(SPEC.secret)
# NOTE: imports first, since a stranger may not read this directory
READ_AS_STRANGER = """
import os, sys
import numpy as np
from tandem.core.errors import TransportError
from tandem.transport.card import Identity
from tandem.transport.cma import CmaTransport
from tests.helpers.transport_pools import COMPATIBILITY, pool_of
os.setgroups([])
os.setgid({stranger})
os.setuid({stranger})
identity = Identity(COMPATIBILITY, bytes.fromhex(sys.argv[2]))
transport = CmaTransport(pool_of(np.zeros((8, 64), dtype=np.uint8)), identity)
try:
    transport.connect(bytes.fromhex(sys.argv[1]))
except TransportError as error:
    print(error)
"""


def reader() -> tuple[CmaTransport, np.ndarray[tuple[int, int], np.dtype[np.uint8]]]:
    pages = np.zeros((SPEC.num_blocks, SPEC.page_bytes), dtype=np.uint8)
    return CmaTransport(pool_of(pages), Identity(COMPATIBILITY, SECRET)), pages


@pytest.mark.skipif(os.geteuid() != 0, reason="it reads as another user, which only root can become")
def test_another_user_is_not_let_in() -> None:
    """Also one that has the cluster's secret and the card."""
    with SourceProcess(SPEC) as source:
        finished = subprocess.run(
            [sys.executable, "-c", READ_AS_STRANGER.format(stranger=STRANGER), source.card.hex(), SPEC.secret],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
    incarnation = unseal(source.card, Identity(COMPATIBILITY, SECRET)).incarnation
    assert f"peer {incarnation}, process " in finished.stdout
    assert "Operation not permitted" in finished.stdout


def test_a_process_that_was_given_the_number_of_a_peer_is_not_read() -> None:
    """Here one that even has its pool and its proof at the same addresses, or nothing there at all."""
    with SourceProcess(SPEC) as source, SourceProcess(SPEC) as other:
        transport, _ = reader()
        identity = Identity(COMPATIBILITY, SECRET)
        card, others = unseal(source.card, identity), unseal(other.card, identity)
        for changes in (json.loads(others.metadata), {"pid": os.getpid()}):
            metadata = json.dumps(json.loads(card.metadata) | changes).encode()
            with pytest.raises(TransportError, match=f"peer {card.incarnation}"):
                transport.connect(seal(replace(card, metadata=metadata), identity))
        transport.close()


def test_a_closed_pool_is_not_read_though_its_memory_is_there() -> None:
    transport, _ = reader()
    source = CmaTransport(pool_of(seeded_pages(0, 4, SPEC.page_bytes)), Identity(COMPATIBILITY, SECRET))
    peer = transport.connect(source.card())
    source.close()
    transfer = transport.read(peer, [1], [1])
    assert transfer.wait(10)
    assert "has closed its pool" in str(transfer.error)
    with pytest.raises(TransportError, match="has closed its pool"):
        transport.connect(source.card())
    transport.close()


def test_more_runs_than_one_call_takes() -> None:
    with SourceProcess(SPEC) as source:
        transport, pages = reader()
        local = list(range(1, SPEC.num_blocks))
        remote = local[::-1]
        transfer = transport.read(transport.connect(source.card), remote, local)
        assert transfer.wait(10)
        assert np.array_equal(pages[local], source.pages[remote])
        transport.close()


@pytest.mark.parametrize(
    "metadata", [b"", b"{}", b'{"pid": 1, "pool": "x", "proof": 3}', b'{"pid":0,"pool":1,"proof":-1}']
)
def test_a_card_that_names_no_memory_is_refused(metadata: bytes) -> None:
    transport, _ = reader()
    theirs = Identity(COMPATIBILITY, SECRET)
    other = CmaTransport(pool_of(seeded_pages(0, 4, SPEC.page_bytes)), theirs)
    wrong = seal(replace(unseal(other.card(), theirs), metadata=metadata), theirs)
    with pytest.raises(IncompatiblePeerError, match="names no memory"):
        transport.connect(wrong)
    transport.close()
    other.close()


def test_a_gpu_pool_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="cuda:1"):
        CmaTransport(MemoryPool(4096, 64, 4, "cuda:1", None), Identity(COMPATIBILITY, SECRET))
