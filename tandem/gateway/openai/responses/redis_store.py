"""Response store in Redis, shared by all gateways of a deployment; `store` describes its methods.

One round trip for each call. An entry is a hash with an encrypted `body` and a flag `running`; a second key exists
while a gateway renews the lease of a running response. Both expire. The sizes of all entries and of each tenant's are
counted in the same Redis. A Redis that is unreachable, slow or full raises UnavailableError; an entry that cannot be
read, RequestError. Causes and remedies are in the log.
"""

import hashlib
import logging
from collections.abc import Awaitable
from typing import cast

import orjson
from redis.exceptions import RedisError

from tandem.core.clock import Clock, SystemClock
from tandem.core.errors import UnavailableError
from tandem.gateway.errors import RequestError
from tandem.gateway.openai.responses.sealing import ResponseSealer, UnsealError
from tandem.gateway.openai.responses.store import ENTRY_COST_BYTES, LEASE_S, MAX_ENTRY_BYTES, StoredResponse
from tandem.redis_client import Outage, answered_within, connect, explained

DEFAULT_TTL_S = 30 * 24 * 3600.0  # as OpenAI has it
MAX_BYTES = 128 * 2**20  # NOTE: a quarter of the Redis that the chart brings, which workers and accounts need too
MAX_DROPPED = 1000  # evictions in one call, unless the new entry needs the room of more

_logger = logging.getLogger(__name__)

# KEYS prefix; ARGV tenant (32 digits), id. An entry is named tenant:id. sizes: a hash by name, and `total`; expiries:
# names by when, in microseconds, of all and of each tenant; held: tenants by bytes.
_COMMON = """
local tenant, name = ARGV[1], ARGV[1] .. ':' .. ARGV[2]
local sizes, held, expiries = KEYS[1] .. ':sizes', KEYS[1] .. ':held', KEYS[1] .. ':expiries'
local function entry_of(name) return string.sub(KEYS[1], 2, -2) .. ':{' .. name .. '}' end
local function alive_of(name) return entry_of(name) .. ':alive' end
local function expiries_of(tenant) return KEYS[1] .. ':expiries:' .. tenant end
local function add(tenant, bytes)
    redis.call('ZINCRBY', held, bytes, tenant)
    redis.call('ZREMRANGEBYSCORE', held, '-inf', 0)
    return redis.call('HINCRBY', sizes, 'total', bytes)
end
local function drop(name)
    local bytes, tenant = redis.call('HGET', sizes, name), string.sub(name, 1, 32)
    if bytes then
        redis.call('HDEL', sizes, name)
        redis.call('ZREM', expiries, name)
        redis.call('ZREM', expiries_of(tenant), name)
        add(tenant, -bytes)
    end
    redis.call('UNLINK', alive_of(name))
    return redis.call('UNLINK', entry_of(name))
end
"""
# ARGV body, running, ttl_ms, lease_ms, only over one that runs, bytes, max_bytes
_PUT = f"""{_COMMON}
if ARGV[7] == '1' and redis.call('HGET', entry_of(name), 'running') ~= '1' then return 0 end
redis.call('HINCRBY', sizes, 'total', 0)  -- NOTE: a full Redis refuses a script's first write, or none of its writes
local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
for _, expired in ipairs(redis.call('ZRANGEBYSCORE', expiries, '-inf', now_us, 'LIMIT', 0, 1000)) do drop(expired) end
drop(name)
local total, num_dropped = add(tenant, ARGV[8]), 0
local before = total - ARGV[8]
-- NOTE: once the bound was lowered, later calls do the rest: one alone would hold up Redis. None leaves more than was
while total > tonumber(ARGV[9]) and (num_dropped < {MAX_DROPPED} or total > before) do
    local oldest  -- NOTE: of the second, when who holds most has nothing but the new entry
    for _, holder in ipairs(redis.call('ZREVRANGE', held, 0, 1)) do
        oldest = oldest or redis.call('ZRANGE', expiries_of(holder), 0, 0)[1]
    end
    if not oldest then break end
    drop(oldest)
    num_dropped = num_dropped + 1
    total = tonumber(redis.call('HGET', sizes, 'total'))
end
redis.call('HSET', sizes, name, ARGV[8])
local expires_us = now_us + ARGV[5] * 1000
redis.call('ZADD', expiries, expires_us, name)
redis.call('ZADD', expiries_of(tenant), expires_us, name)
redis.call('HSET', entry_of(name), 'body', ARGV[3], 'running', ARGV[4])
redis.call('PEXPIREAT', entry_of(name), math.floor(expires_us / 1000))
if ARGV[4] == '1' then redis.call('SET', alive_of(name), '1', 'PX', ARGV[6]) end
return 1
"""
_FIND = f"""{_COMMON}
local found = redis.call('HMGET', entry_of(name), 'body', 'running')
return {{found[1], found[2], redis.call('EXISTS', alive_of(name))}}
"""
# ARGV lease_ms
_RENEW = f"""{_COMMON}
if redis.call('HGET', entry_of(name), 'running') ~= '1' then return 0 end
redis.call('SET', alive_of(name), '1', 'PX', ARGV[3])
return 1
"""
_DELETE = f"{_COMMON} return drop(name)"


class RedisResponseStore:
    """A `ResponseStore` in one Redis (7.0 or newer). Owned by one event loop.

    Args:
        url: as for `redis_client.connect`.
        sealer: encrypts the entries.
        prefix: names the deployment.
        ttl_s: lifetime of an entry, seconds.
        max_bytes: of all entries, overhead included.
        timeout_s: of each call.
        retry_after_s: after a failed call, further ones fail at once for this long.

    Raises:
        ConfigurationError: the URL is not understood.
    """

    def __init__(
        self,
        url: str,
        sealer: ResponseSealer,
        *,
        prefix: str = "tandem:responses",
        ttl_s: float = DEFAULT_TTL_S,
        max_bytes: int = MAX_BYTES,
        max_entry_bytes: int = MAX_ENTRY_BYTES,
        lease_s: float = LEASE_S,
        timeout_s: float = 1.0,
        retry_after_s: float = 1.0,
        clock: Clock | None = None,
    ) -> None:
        self._redis = connect(url)
        self._sealer = sealer
        self._timeout_s = timeout_s
        self._key = f"{{{prefix}}}"
        self._ttl_ms = max(1, round(ttl_s * 1000))
        self._lease_ms = max(1, round(lease_s * 1000))
        self._max_bytes = max_bytes
        self._max_entry_bytes = min(max_entry_bytes, max_bytes - ENTRY_COST_BYTES)
        self._outage = Outage(clock or SystemClock(), retry_after_s)

    async def put(self, tenant: str, entry: StoredResponse, *, over_running: bool = False) -> bool:
        text = entry.encoded(self._max_entry_bytes)
        times = (self._ttl_ms, self._lease_ms)
        sizes = (len(text) + ENTRY_COST_BYTES, self._max_bytes)
        sealed = self._sealer.seal(text, self._place(tenant, entry.response_id))
        told = (sealed, int(entry.is_running), *times, int(over_running), *sizes)
        return bool(await self._run(_PUT, tenant, entry.response_id, *told))

    async def find(self, tenant: str, response_id: str) -> StoredResponse | None:
        sealed, running, alive = cast(list[object], await self._run(_FIND, tenant, response_id))
        if sealed is None:
            return None
        try:
            text = self._sealer.unseal(cast(bytes, sealed), self._place(tenant, response_id))
            return StoredResponse.decode(text, is_lost=running == b"1" and not alive)
        except UnsealError as error:
            _logger.warning(
                "response %s cannot be read: %s. All gateways need the same responses_key, and after a change the old "
                "one behind the new one",
                response_id,
                error,
            )
            raise _unreadable(response_id) from error
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            _logger.warning("Redis holds no response under the id %s: %s", response_id, error)
            raise _unreadable(response_id) from error

    async def renew(self, tenant: str, response_id: str) -> bool:
        return bool(await self._run(_RENEW, tenant, response_id, self._lease_ms))

    async def delete(self, tenant: str, response_id: str) -> bool:
        return bool(await self._run(_DELETE, tenant, response_id))

    async def close(self) -> None:
        await self._redis.aclose()

    def _place(self, tenant: str, response_id: str) -> bytes:
        return f"{self._key}:{_owner(tenant)}:{response_id}".encode()

    async def _run(self, script: str, tenant: str, response_id: str, *arguments: bytes | int) -> object:
        if self._outage.is_on:
            raise _away()
        owner, num_answers = _owner(tenant), self._outage.num_answers
        try:
            async with answered_within(self._timeout_s):
                answer = await cast(
                    Awaitable[object], self._redis.eval(script, 1, self._key, owner, response_id, *arguments)
                )
        except (RedisError, OSError) as error:
            if self._outage.note_failure(num_answers):
                _logger.warning("the store of responses does not answer: %s", explained(error, "gateway"))
            raise _away() from error
        if self._outage.note_answer():
            _logger.info("the store of responses answers again")
        return answer


def _away() -> UnavailableError:
    """The error for clients; the cause is in the log."""
    return UnavailableError("stored responses are temporarily not available; try again", 1.0)


def _unreadable(response_id: str) -> RequestError:
    """The error for an entry that cannot be decrypted or parsed; a retry does not help."""
    return RequestError(
        f"response {response_id} can no longer be read; send its request again, or delete it",
        param="response_id",
        code="response_unreadable",
        status=404,
    )


def _owner(tenant: str) -> str:
    return hashlib.blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
