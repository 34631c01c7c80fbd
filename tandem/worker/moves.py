"""Refuses settings by which state would leave a worker whose state cannot be moved."""

from tandem.core.errors import ConfigurationError
from tandem.worker.settings import WorkerSettings


def refuse_moves_of_hosts(settings: WorkerSettings) -> None:
    """Refuses what would move KV blocks of ranks on other hosts, whose memory this process does not have.

    Raises:
        ConfigurationError: the message names the setting and the remedy.
    """
    if settings.hosts == 1:
        return
    if settings.host_kv_bytes:
        raise ConfigurationError(
            f"host_kv_gib={settings.host_kv_gib:g} with hosts={settings.hosts}: the host tier holds no blocks of other "
            "hosts yet; leave host_kv_gib at 0"
        )
