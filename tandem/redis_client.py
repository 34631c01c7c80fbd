"""A Redis as tasks of an event loop ask it; whoever asks bounds each call with `asyncio.timeout`."""

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from tandem.core.errors import ConfigurationError


def connect(url: str, *, connect_timeout_s: float, num_retries: int = 0) -> Redis:
    """A client that connects when first used, and again after a loss.

    NOTE: it has no timeout of its own for calls. That one is an `asyncio.wait_for` around each send, which before
    Python 3.12 loses a cancellation that comes together with its result: a task that asks again and again is then
    never ended.

    Raises:
        ConfigurationError: the URL is not understood. Whether Redis is there is not asked.
    """
    retry = Retry(NoBackoff(), num_retries)
    try:
        return Redis.from_url(url, socket_timeout=None, socket_connect_timeout=connect_timeout_s, retry=retry)
    except ValueError:
        where = url.rpartition("@")[2]  # NOTE: what stands before may be a password, and `error` may quote a part of it
        raise ConfigurationError(
            f"Redis URL {where!r} is not understood; write redis://host:port, and / ? # of a password as %2F %3F %23"
        ) from None
