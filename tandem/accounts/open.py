"""Opens the store of accounts that a setting names, a Redis or a file; nothing is asked of a Redis yet."""

from pathlib import Path

from tandem.accounts.embedded import EmbeddedAccounts
from tandem.accounts.store import LEASE_S, AccountStore
from tandem.core.clock import Clock

_REDIS = ("redis://", "rediss://", "unix://", "redis+sentinel://", "rediss+sentinel://")


def open_store(where: str, clock: Clock, lease_s: float = LEASE_S) -> AccountStore:
    """`where`: the URL of a Redis, which several gateways can share, or a file, which they cannot.

    Raises:
        ConfigurationError: the URL is not understood or the file cannot be used.
    """
    if where.startswith(_REDIS):
        from tandem.accounts.redis_store import RedisAccounts

        return RedisAccounts(where, clock, lease_s=lease_s)
    return EmbeddedAccounts(Path(where.removeprefix("sqlite://")), clock, lease_s=lease_s)
