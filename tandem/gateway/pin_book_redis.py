"""Pin book in Redis, shared by gateways: prompt prefixes that clients have paid to keep cached, by block hash.

`pin_book` describes its methods. One round trip for each call; entries expire by themselves.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from redis.exceptions import RedisError

from tandem.core.errors import UnavailableError
from tandem.redis_client import answered_within, connect, explained

_logger = logging.getLogger(__name__)
_PREFIX = b"tandem:pins:"
_KEY_BYTES = 16
# KEYS: what is kept. ARGV: the seconds of each. The value is the longest lifetime it was ever kept with while it lived.
_KEEP = """
for i, key in ipairs(KEYS) do
  local seconds = tonumber(ARGV[i])
  local known = tonumber(redis.call('GET', key) or '0') or 0
  local left_ms = redis.call('PTTL', key)
  redis.call('SET', key, tostring(math.max(known, seconds)), 'PX', math.max(left_ms, math.ceil(seconds * 1000)))
end
"""


class RedisPinBook:
    """A `PinBook` in Redis. A value that is no number counts as not pinned."""

    def __init__(self, url: str, timeout_s: float = 0.5) -> None:
        self._redis: Any = connect(url, num_retries=1)
        self._timeout_s = timeout_s

    async def find(self, keys: Sequence[bytes]) -> Sequence[float | None]:
        if not keys:
            return []
        try:
            async with answered_within(self._timeout_s):
                values = await self._redis.mget([_name(key) for key in keys])
        except (RedisError, OSError) as error:
            raise _unavailable("say", error) from error
        return [_seconds(value) for value in values]

    async def keep(self, lifetimes: Mapping[bytes, float]) -> None:
        names = [_name(key) for key in lifetimes]
        try:
            async with answered_within(self._timeout_s):
                await self._redis.eval(_KEEP, len(names), *names, *map(str, lifetimes.values()))
        except (RedisError, OSError) as error:
            raise _unavailable("note", error) from error

    async def close(self) -> None:
        await self._redis.aclose()


def _unavailable(verb: str, error: Exception) -> UnavailableError:
    _logger.warning("Redis does not %s what is kept: %s", verb, explained(error, "gateway"))
    return UnavailableError("this server does not know now what is kept of prompts; try again", 1.0)


def _name(key: bytes) -> bytes:
    return _PREFIX + key[:_KEY_BYTES]


def _seconds(value: bytes | None) -> float | None:
    try:
        return None if value is None else float(value)
    except ValueError:
        return None
