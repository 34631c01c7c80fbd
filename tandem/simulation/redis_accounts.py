"""Accounts in the simulated Redis: adds keys before a run, reads spending and ledger after it."""

import json
from collections.abc import Mapping, Sequence

from tandem.accounts.charge import LedgerEntry
from tandem.accounts.key import AccountKey
from tandem.accounts.redis_scripts import SPENDING
from tandem.accounts.redis_store import encoded_key
from tandem.accounts.store import Spending
from tandem.simulation.redis import SimulatedRedis

_PREFIX = "{tandem:accounts}"


def add_keys(redis: SimulatedRedis, keys: Sequence[AccountKey]) -> None:
    """Loads account keys, as if they had existed from the start."""
    for key in keys:
        redis.load(b"HSET", _name("keys"), key.key_id.encode(), encoded_key(key).encode())


def spending_of_keys(redis: SimulatedRedis) -> Mapping[str, Spending]:
    """Spending by key id. NOTE: this changes the accounts: holds that were not renewed in time expire first."""
    records = redis.run(b"HVALS", _name("keys"))
    assert isinstance(records, list)
    return {key_id: _spending(redis, key_id) for key_id in (json.loads(record)["key_id"] for record in records)}


def ledger_of(redis: SimulatedRedis) -> Sequence[LedgerEntry]:
    """Returns all entries of the ledger, in order."""
    return [
        LedgerEntry.from_json(json.loads(dict(zip(pairs[::2], pairs[1::2], strict=True))[b"entry"]))
        for _, pairs in redis.data.stream(_name("ledger"))
    ]


def _spending(redis: SimulatedRedis, key_id: str) -> Spending:
    names = [_name(f"{part}:{key_id}") for part in ("state", "open", "held")]
    reply = redis.run(b"EVAL", SPENDING.encode(), b"3", *names, b"")
    assert isinstance(reply, list)
    spent, held, num_open = reply
    return Spending(int(spent), int(held), int(num_open))


def _name(name: str) -> bytes:
    return f"{_PREFIX}:{name}".encode()
