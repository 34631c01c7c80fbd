"""Chooses how a worker announces itself: through Redis or to the routers.

A module of its own because the implementations import `discovery`.
"""

from collections.abc import Sequence

from tandem.process.discovery import Discovery, RouterDiscovery
from tandem.rpc.credentials import Credentials


def open_discovery(redis: str | None, routers: Sequence[str], credentials: Credentials) -> Discovery:
    """Opens a worker's discovery: Redis if there is a URL, else the routers. Imports only the chosen one.

    Raises:
        ConfigurationError: the URL is not understood.
        InvalidRequestError: neither is given.
    """
    if redis:
        from tandem.process.discovery_redis import RedisDiscovery

        return RedisDiscovery(redis, credentials)
    return RouterDiscovery(routers, credentials)
