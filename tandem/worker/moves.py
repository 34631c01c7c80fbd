"""Refuses settings by which state would leave a worker whose state cannot be moved."""

from tandem.core.errors import ConfigurationError
from tandem.routing.snapshot import Role
from tandem.worker.settings import WorkerSettings

_DECODE_ALONE = "serve it by decode workers alone, which compute prompts themselves (`tandem up --prefill 0`)"
_NO_HOST_TIER = "leave host_kv_gib at 0"


def refuse_moves_of_ranks(settings: WorkerSettings) -> None:
    """Refuses what would move KV blocks of several ranks, each of which has a part.

    Raises:
        ConfigurationError: the message names the setting and the remedy.
    """
    if settings.tp == 1:
        return
    reason = f"with tp={settings.tp}: the KV blocks of several ranks do not leave their worker yet"
    if settings.role is not Role.DECODE:
        raise ConfigurationError(f"role={str(settings.role)!r} {reason}; {_DECODE_ALONE}")
    if settings.host_kv_bytes:
        raise ConfigurationError(f"host_kv_gib={settings.host_kv_gib:g} {reason}; {_NO_HOST_TIER}")
