"""Cache of keys in a gateway, so that a lookup costs a request nothing.

Invariant: a revoked key is refused within two refreshes while the store answers. Bounded; the least recently used key
is evicted.
"""

from collections import OrderedDict

from tandem.accounts.errors import AccountsUnavailableError
from tandem.accounts.key import AccountKey
from tandem.accounts.store import KeyStore
from tandem.core.clock import Clock

REFRESH_S = 1.0  # between two refreshes
MAX_KEYS = 10_000


class KeyCache:
    """Loads unknown keys from `store`, and all cached ones again on `refresh`. Owned by one event loop.

    Args:
        may_be_stale: cached keys stay valid while the store is unavailable.
    """

    def __init__(self, store: KeyStore, clock: Clock, *, may_be_stale: bool) -> None:
        self._store = store
        self._clock = clock
        self._may_be_stale = may_be_stale
        self._keys: OrderedDict[str, AccountKey] = OrderedDict()
        self._fresh_s = clock.now_s()

    async def find(self, key_id: str) -> AccountKey | None:
        """The key, or None. Raises AccountsUnavailableError where the store must be asked and is unavailable."""
        key = self._keys.get(key_id)
        if key is not None and (self._may_be_stale or self._clock.now_s() - self._fresh_s < 2 * REFRESH_S):
            self._keys.move_to_end(key_id)
            return key
        key = (await self._store.find_keys([key_id])).get(key_id)
        if key is not None:
            self._keys[key_id] = key
            if len(self._keys) > MAX_KEYS:
                self._keys.popitem(last=False)
        return key

    async def refresh(self) -> None:
        """Reloads the cached keys to notice revocations; while the store is unavailable they stay and become stale."""
        asked_s = self._clock.now_s()
        key_ids = tuple(self._keys)
        try:
            found = await self._store.find_keys(key_ids) if key_ids else {}
        except AccountsUnavailableError:
            return
        for key_id in key_ids:
            if key_id not in self._keys:
                continue  # forgotten meanwhile
            if key_id in found:
                self._keys[key_id] = found[key_id]
            else:
                del self._keys[key_id]
        self._fresh_s = asked_s
