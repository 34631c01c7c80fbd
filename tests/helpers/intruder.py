"""A process of another user of the machine that knows a worker's ports and tries a secret of its own.

Run as a script with a JSON object of `pid`, `address` (gRPC), `secret` (hexadecimal) and `card` (fields of a `Card`,
its `metadata` in hexadecimal); prints a JSON object of what it saw. Started by root, it becomes a user without rights.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tandem.core.errors import TandemError
from tandem.rpc.client import WorkerClient
from tandem.rpc.credentials import Credentials, ProcessRole
from tandem.transport.card import Card, Identity, seal
from tandem.transport.tcp.transport import TcpTransport
from tests.helpers.transport_pools import pool_of

NOBODY = 65534


def become_nobody() -> None:
    """Give up root's rights; another user stays who it is."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def environment_of(pid: int) -> str:
    """Environment that a process was started with, or the reason why it cannot be read."""
    try:
        return Path(f"/proc/{pid}/environ").read_text()
    except OSError as error:
        return f"refused: {error}"


def pool_bytes(card: Card, secret: bytes) -> str:
    """Number of non-zero bytes in the worker's whole pool, read over TCP, or the reason why it cannot be read."""
    pages, blocks = np.zeros((card.num_blocks, card.page_bytes), np.uint8), range(1, card.num_blocks)
    identity = Identity(card.compatibility, secret)
    transport = TcpTransport(pool_of(pages), identity)
    try:
        transfer = transport.read(transport.connect(seal(card, identity)), blocks, blocks)
        transfer.wait()
        return f"refused: {transfer.error}" if transfer.error else str(np.count_nonzero(pages))
    except TandemError as error:
        return f"refused: {error}"
    finally:
        transport.close()


async def status_of(address: str, secret: bytes) -> str:
    """A worker's id, as its status says; or why it cannot be asked."""
    client = WorkerClient(address, Credentials(secret, ProcessRole.OPERATOR))
    try:
        return (await client.status()).worker.worker_id
    except TandemError as error:
        return f"refused: {error}"
    finally:
        await client.close()


def look(told: dict[str, Any]) -> dict[str, object]:
    secret, fields = bytes.fromhex(told["secret"]), told["card"]
    card = Card(**{**fields, "metadata": bytes.fromhex(fields["metadata"])})
    return {
        "user": os.geteuid(),
        "environment": environment_of(told["pid"]),
        "pool": pool_bytes(card, secret),
        "status": asyncio.run(status_of(told["address"], secret)),
    }


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    look(given)  # NOTE: loads what is imported late, from where another user may not read
    become_nobody()
    sys.stdout.write(json.dumps(look(given)))
