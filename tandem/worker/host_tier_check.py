"""Check of the host tier of a worker whose ranks are on several hosts."""

from tandem.core.errors import ConfigurationError
from tandem.worker.settings import WorkerSettings


def check_host_tier(settings: WorkerSettings) -> None:
    """Raises `ConfigurationError` for a host tier (pinned KV in this host's memory) of a worker whose ranks are on
    several hosts, since this process has no access to their blocks. The message names the setting and the remedy.
    """
    if settings.hosts == 1:
        return
    if settings.host_kv_bytes:
        raise ConfigurationError(
            f"host_kv_gib={settings.host_kv_gib:g} with hosts={settings.hosts}: the host tier holds no blocks of other "
            "hosts yet; leave host_kv_gib at 0"
        )
