"""Opens the account store that a setting names: Redis or a file. Does not contact Redis yet."""

from pathlib import Path

from tandem.accounts.embedded import EmbeddedAccounts
from tandem.accounts.store import LEASE_S, AccountStore
from tandem.core.clock import Clock
from tandem.core.errors import ConfigurationError

_REDIS = ("redis://", "rediss://", "unix://", "redis+sentinel://", "rediss+sentinel://")


def open_store(where: str, clock: Clock, lease_s: float = LEASE_S, *, must_exist: bool = False) -> AccountStore:
    """The store. `where`: the URL of a Redis, for several gateways, or a file, for one. `must_exist`: never
    create it.

    Raises:
        ConfigurationError: the URL is not understood, or the file cannot be used or is missing.
    """
    if where.startswith(_REDIS):
        from tandem.accounts.redis_store import RedisAccounts

        return RedisAccounts(where, clock, lease_s=lease_s)
    path = Path(where.removeprefix("sqlite://"))
    if must_exist and not path.is_file():
        raise ConfigurationError(
            f"accounts={path}: there is no such file; name the one that gateways have as --accounts, or make a first "
            "key there by `tandem keys create`"
        )
    return EmbeddedAccounts(path, clock, lease_s=lease_s)
