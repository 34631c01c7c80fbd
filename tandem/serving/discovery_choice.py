"""Choice of a worker's discovery: Redis or the routers. Kept apart from `discovery`, which implementations import."""

from collections.abc import Sequence

from tandem.rpc.credentials import Credentials
from tandem.serving.discovery import Discovery, RouterDiscovery


def open_discovery(redis: str | None, routers: Sequence[str], credentials: Credentials) -> Discovery:
    """Opens a worker's discovery: Redis if there is a URL, else the routers. Imports only the one chosen.

    Raises:
        ConfigurationError: the URL is not understood.
        InvalidRequestError: neither is given.
    """
    if redis:
        from tandem.serving.discovery_redis import RedisDiscovery

        return RedisDiscovery(redis, credentials)
    return RouterDiscovery(routers, credentials)
