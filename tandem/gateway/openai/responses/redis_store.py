"""Responses in Redis, shared by all gateways of a deployment. One round trip a question.

Each entry is a hash, `body` and `running`, beside a key that lives while its gateway renews it; both share a hash tag
and expire. A Redis that is away, slow, full or holds nonsense raises UnavailableError and nothing else.
"""

import asyncio
import hashlib
from collections.abc import Awaitable
from typing import cast

import orjson
from redis.exceptions import RedisError

from tandem.core.clock import Clock, SystemClock
from tandem.core.errors import UnavailableError
from tandem.gateway.openai.responses.store import LEASE_S, MAX_ENTRY_BYTES, StoredResponse
from tandem.redis_client import connect

DEFAULT_TTL_S = 30 * 24 * 3600.0  # as OpenAI has it
# KEYS entry, alive; ARGV body, running, ttl_ms, lease_ms, only over one that runs
_PUT = """
if ARGV[5] == '1' and redis.call('HGET', KEYS[1], 'running') ~= '1' then return 0 end
redis.call('HSET', KEYS[1], 'body', ARGV[1], 'running', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
if ARGV[2] == '1' then redis.call('SET', KEYS[2], '1', 'PX', ARGV[4]) else redis.call('DEL', KEYS[2]) end
return 1
"""
_FIND = """
local found = redis.call('HMGET', KEYS[1], 'body', 'running')
return {found[1], found[2], redis.call('EXISTS', KEYS[2])}
"""
# ARGV lease_ms
_RENEW = """
if redis.call('HGET', KEYS[1], 'running') ~= '1' then return 0 end
redis.call('SET', KEYS[2], '1', 'PX', ARGV[1])
return 1
"""
_DELETE = "redis.call('DEL', KEYS[2]) return redis.call('DEL', KEYS[1])"


class RedisResponseStore:
    """`ResponseStore` in one Redis (7.0 or newer, or a cluster). Owned by one event loop.

    Args:
        url: `redis://`, `rediss://` or `unix://` URL.
        prefix: names the deployment.
        ttl_s: after this long an entry is gone.
        timeout_s: a question that takes longer is given up.
        retry_after_s: after a failed question, further ones fail at once for this long.

    Raises:
        ConfigurationError: the URL is not understood.
    """

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "tandem:responses",
        ttl_s: float = DEFAULT_TTL_S,
        max_entry_bytes: int = MAX_ENTRY_BYTES,
        lease_s: float = LEASE_S,
        timeout_s: float = 1.0,
        retry_after_s: float = 1.0,
        clock: Clock | None = None,
    ) -> None:
        self._redis = connect(url, connect_timeout_s=timeout_s)
        self._timeout_s = timeout_s
        self._prefix = prefix
        self._ttl_ms = max(1, round(ttl_s * 1000))
        self._lease_ms = max(1, round(lease_s * 1000))
        self._max_entry_bytes = max_entry_bytes
        self._retry_after_s = retry_after_s
        self._clock = clock or SystemClock()
        self._away_until_s = float("-inf")

    async def put(self, tenant: str, entry: StoredResponse, *, over_running: bool = False) -> bool:
        text = entry.encoded(self._max_entry_bytes)
        keys = self._keys(tenant, entry.response_id)
        told = (int(entry.is_running), self._ttl_ms, self._lease_ms, int(over_running))
        return bool(await self._run(_PUT, keys, text, *told))

    async def find(self, tenant: str, response_id: str) -> StoredResponse | None:
        text, running, alive = cast(list[object], await self._run(_FIND, self._keys(tenant, response_id)))
        if text is None:
            return None
        try:
            return StoredResponse.decode(cast(bytes, text), is_lost=running == b"1" and not alive)
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise UnavailableError(f"Redis holds nonsense for response {response_id}: {error}", 1.0) from error

    async def renew(self, tenant: str, response_id: str) -> bool:
        return bool(await self._run(_RENEW, self._keys(tenant, response_id), self._lease_ms))

    async def delete(self, tenant: str, response_id: str) -> bool:
        return bool(await self._run(_DELETE, self._keys(tenant, response_id)))

    async def close(self) -> None:
        await self._redis.aclose()

    def _keys(self, tenant: str, response_id: str) -> tuple[str, str]:
        owner = hashlib.blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        entry = f"{self._prefix}:{{{owner}:{response_id}}}"
        return entry, f"{entry}:alive"

    async def _run(self, script: str, keys: tuple[str, str], *arguments: bytes | int) -> object:
        if self._clock.now_s() < self._away_until_s:
            raise UnavailableError("the store of responses did not answer a moment ago; try again shortly", 1.0)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await cast(Awaitable[object], self._redis.eval(script, 2, *keys, *arguments))
        except (RedisError, OSError) as error:
            self._away_until_s = self._clock.now_s() + self._retry_after_s
            raise UnavailableError(f"the store of responses does not answer ({error}); try again", 1.0) from error
