"""Refuses settings by which state would leave a worker whose state cannot be moved."""

from tandem.core.errors import ConfigurationError
from tandem.worker.settings import WorkerSettings


def refuse_moves_of_ranks(settings: WorkerSettings) -> None:
    """Refuses what would move KV blocks of several ranks into memory that has no part for each.

    Raises:
        ConfigurationError: the message names the setting and the remedy.
    """
    if settings.num_ranks > 1 and settings.host_kv_bytes:
        width = f"tp={settings.tp}" if settings.pp == 1 else f"pp={settings.pp}"
        raise ConfigurationError(
            f"host_kv_gib={settings.host_kv_gib:g} with {width}: the host tier holds no blocks of several "
            "ranks yet; leave host_kv_gib at 0"
        )
