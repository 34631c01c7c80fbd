"""Keys are known without asking, but never for long after they changed."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest

from tandem.accounts.errors import AccountsUnavailableError
from tandem.accounts.key import AccountKey, new_key
from tandem.accounts.key_cache import MAX_KEYS, KeyCache
from tandem.core.clock import ManualClock


@dataclass
class Keys:
    """A store of keys that counts what it is asked."""

    keys: dict[str, AccountKey] = field(default_factory=dict)
    is_there: bool = True
    asked: list[Sequence[str]] = field(default_factory=list)

    async def add_key(self, key: AccountKey) -> None:
        self.keys[key.key_id] = key

    async def find_keys(self, key_ids: Sequence[str]) -> Mapping[str, AccountKey]:
        self.asked.append(tuple(key_ids))
        if not self.is_there:
            raise AccountsUnavailableError("away")
        return {key_id: self.keys[key_id] for key_id in key_ids if key_id in self.keys}

    async def all_keys(self) -> Sequence[AccountKey]:
        return list(self.keys.values())

    async def revoke_key(self, key_id: str, now_s: int) -> bool:
        self.keys[key_id] = self.keys[key_id].revoked(now_s)
        return True


KEY = new_key("a", 1)[0]


def test_a_known_key_costs_nothing() -> None:
    async def run() -> None:
        store, clock = Keys({KEY.key_id: KEY}), ManualClock()
        cache = KeyCache(store, clock, may_be_stale=False)
        for _ in range(10):
            assert await cache.find(KEY.key_id) == KEY
        assert len(store.asked) == 1
        assert await cache.find("nobody") is None

    asyncio.run(run())


def test_a_refresh_hears_of_revoked_and_vanished_keys() -> None:
    async def run() -> None:
        store, clock = Keys({KEY.key_id: KEY}), ManualClock()
        cache = KeyCache(store, clock, may_be_stale=False)
        await cache.find(KEY.key_id)
        await store.revoke_key(KEY.key_id, 5)
        await cache.refresh()
        found = await cache.find(KEY.key_id)
        assert found is not None
        assert not found.is_live
        store.keys.clear()
        await cache.refresh()
        assert await cache.find(KEY.key_id) is None

    asyncio.run(run())


@pytest.mark.parametrize("may_be_stale", [True, False])
def test_old_knowledge_counts_only_where_it_may(may_be_stale: bool) -> None:
    async def run() -> None:
        store, clock = Keys({KEY.key_id: KEY}), ManualClock()
        cache = KeyCache(store, clock, may_be_stale=may_be_stale)
        await cache.find(KEY.key_id)
        store.is_there = False
        await cache.refresh()
        clock.advance(1.9)
        assert await cache.find(KEY.key_id) == KEY
        clock.advance(0.2)
        if may_be_stale:
            assert await cache.find(KEY.key_id) == KEY
        else:
            with pytest.raises(AccountsUnavailableError):
                await cache.find(KEY.key_id)
        with pytest.raises(AccountsUnavailableError):
            await cache.find("nobody")

    asyncio.run(run())


@dataclass
class SlowKeys(Keys):
    """Answers a question for many keys when told to."""

    is_asked: asyncio.Event = field(default_factory=asyncio.Event)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    async def find_keys(self, key_ids: Sequence[str]) -> Mapping[str, AccountKey]:
        if len(key_ids) > 1:
            self.is_asked.set()
            await self.may_answer.wait()
        return await super().find_keys(key_ids)


def test_a_refresh_brings_back_no_key_that_was_forgotten_meanwhile() -> None:
    """It put back those that made room while the store was asked, so the cache grew beyond its bound for ever."""

    async def run() -> None:
        keys = [replace(KEY, key_id=f"k{i}") for i in range(MAX_KEYS + 10)]
        store = SlowKeys({key.key_id: key for key in keys})
        cache = KeyCache(store, ManualClock(), may_be_stale=False)
        for key in keys[:MAX_KEYS]:
            await cache.find(key.key_id)
        refresh = asyncio.create_task(cache.refresh())
        await store.is_asked.wait()
        for key in keys[MAX_KEYS:]:
            await cache.find(key.key_id)
        store.may_answer.set()
        await refresh
        store.asked.clear()
        await cache.refresh()
        assert [len(asked) for asked in store.asked] == [MAX_KEYS]

    asyncio.run(run())
