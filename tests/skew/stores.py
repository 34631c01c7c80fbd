"""Writes into the stores that gateways keep, or prints what is in them: run by each release with its own code.

`stores.py write|settle|read FOLDER REDIS`: accounts in a file and in Redis, the journal, stored responses, pins. It
prints one JSON object, which is compared with what the other release prints.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import tandem
from tandem.accounts.charge import Charge, ChargeSettlement, LedgerEntry, Renewal
from tandem.accounts.embedded import EmbeddedAccounts
from tandem.accounts.journal import Journal
from tandem.accounts.key import AccountKey, KeyLimits
from tandem.accounts.ledger_query import LedgerQuery
from tandem.accounts.redis_store import RedisAccounts
from tandem.accounts.usage import Usage
from tandem.core.clock import SystemClock
from tandem.gateway.openai.responses.redis_store import RedisResponseStore
from tandem.gateway.openai.responses.sealing import ResponseSealer
from tandem.gateway.openai.responses.store import StoredResponse
from tandem.gateway.pin_book_redis import RedisPinBook

LIMITS = KeyLimits(
    requests_per_minute=100,
    input_tokens_per_minute=5000,
    output_tokens_per_minute=6000,
    concurrency=4,
    budget_nanos=10**12,
)
KEY = AccountKey(
    key_id="0123456789ab",
    digest="d" * 64,
    name="a key",
    tenant="tenant",
    created_s=1,
    limits=LIMITS,
    models=("m",),
    cache_group="group",
)
MOST = Usage(num_input=50, num_written_5m=16, num_written_1h=32, num_read=64, num_output=20)
RESPONSE = StoredResponse({"id": "resp_1", "status": "completed", "output": []}, [{"type": "message", "content": "é"}])
PIN = b"p" * 16
TIMEOUT_S = 10.0


def settlement_of(charge: Charge) -> ChargeSettlement:
    entry = LedgerEntry(charge.charge_id, "r", KEY.key_id, KEY.tenant, "m", 86_400_000, MOST, 777, "done")
    return ChargeSettlement(entry, KEY.limits.rates, charge.amounts, True, (1, 100, 20))


async def write(store: Any) -> None:
    """A request that ended, and one that runs and has been checkpointed."""
    await store.add_key(KEY)
    done, running = (Charge.of(name, KEY, MOST, 1000) for name in ("done", "running"))
    for charge in (done, running):
        await store.reserve(charge)
    await store.settle(settlement_of(done))
    await store.renew([Renewal(running, True, settlement_of(running).entry)])


async def settle(store: Any) -> None:
    """End the one that the other release began."""
    await store.settle(settlement_of(Charge.of("running", KEY, MOST, 1000)))


async def told(store: Any) -> dict[str, Any]:
    spending = await store.spending(KEY.key_id)
    entries = await store.entries(LedgerQuery())
    return {
        "keys": [key.as_json() | {"digest": key.digest} for key in await store.all_keys()],
        "entries": sorted((entry.as_json() for entry in entries), key=lambda entry: str(entry["charge_id"])),
        "totals": [[total.day, total.num_requests, total.cost_nanos] for total in await store.totals()],
        "spent": spending.spent_nanos,
    }


@asynccontextmanager
async def accounts(folder: Path, redis: str) -> AsyncIterator[dict[str, Any]]:
    """Both kinds, open."""
    stores: dict[str, Any] = {
        "file": EmbeddedAccounts(folder / "accounts.db", SystemClock()),
        "redis": RedisAccounts(redis, SystemClock(), timeout_s=TIMEOUT_S),
    }
    for store in stores.values():
        store.start()
    try:
        yield stores
    finally:
        for store in stores.values():
            await store.close()


async def main(verb: str, folder: Path, redis: str) -> dict[str, Any]:
    responses = RedisResponseStore(redis, ResponseSealer([b"the key of stored responses"]), timeout_s=TIMEOUT_S)
    pins, journal = RedisPinBook(redis, TIMEOUT_S), Journal(folder / "journal")
    async with accounts(folder, redis) as stores:
        if verb == "write":
            for store in stores.values():
                await write(store)
            await responses.put("tenant", RESPONSE)
            await pins.keep({PIN: 300.0})
            journal.add([settlement_of(Charge.of("kept", KEY, MOST, 1000))])
        elif verb == "settle":
            for store in stores.values():
                await settle(store)
    async with accounts(folder, redis) as stores:  # NOTE: closing the file's waits until all is written
        found = await responses.find("tenant", "resp_1")
        said: dict[str, Any] = {name: await told(store) for name, store in stores.items()}
        said["response"] = None if found is None else [found.response, found.items]
        said["pins"] = list(await pins.find([PIN]))
        said["journal"] = [settlement.as_json() for settlement in journal.read()]
    await responses.close()
    await pins.close()
    return said | {"code": tandem.__file__}


if __name__ == "__main__":
    found = asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
    sys.stdout.write(json.dumps(found))
