"""Discovery in Redis: one hash of worker records, each with the time until which it counts, by Redis' own clock.

Invariant: nothing outlives `ttl_s` without announcements, and whatever else is found under the key is ignored or
replaced, never believed. A Redis that is away, slow or full raises `LocalityUnavailableError` within the timeout.
"""

import dataclasses
import json
import logging
from collections.abc import Sequence
from typing import Any

from redis.exceptions import RedisError

from tandem.core.errors import InvalidRequestError, LocalityUnavailableError, shown
from tandem.redis_client import answered_within, connect, explained
from tandem.rpc.messages import WorkerAddress, WorkerRecord
from tandem.serving.discovery import MAX_WORKERS, TTL_S, check_record

_LOG = logging.getLogger(__name__)

# Each entry is "<milliseconds until which it counts>|<JSON>". One script a call, so each call is atomic.
_COMMON = """
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'hash' and kind ~= 'none' then redis.call('DEL', KEYS[1]) end
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
"""
_ANNOUNCE = (
    _COMMON
    + """
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f', now_ms + ARGV[3]) .. '|' .. ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
"""
)
_WITHDRAW = (
    _COMMON
    + """
local entry = redis.call('HGET', KEYS[1], ARGV[1])
if entry and string.match(entry, '^%d+|(.*)$') == ARGV[2] then redis.call('HDEL', KEYS[1], ARGV[1]) end
"""
)
_WORKERS = (
    _COMMON
    + """
local entries, found = redis.call('HGETALL', KEYS[1]), {}
for i = 1, #entries, 2 do
  local until_ms, record = string.match(entries[i + 1], '^(%d+)|(.*)$')
  if not until_ms then
    table.insert(found, '')
    redis.call('HDEL', KEYS[1], entries[i])
  elseif tonumber(until_ms) > now_ms + tonumber(ARGV[1]) or tonumber(until_ms) <= now_ms then
    redis.call('HDEL', KEYS[1], entries[i])
  else
    table.insert(found, record)
  end
end
return found
"""
)


class RedisDiscovery:
    """`Discovery` in one Redis (7.0 or newer), shared by all routers and workers of a deployment.

    Args:
        url: `redis://`, `rediss://` or `unix://` URL.
        prefix: names the deployment; the key of the hash.
        ttl_s: how long an announcement counts.
        timeout_s: of every call, connecting included.

    Raises:
        ConfigurationError: the URL is not understood. Whether Redis is there is not asked.
    """

    def __init__(
        self, url: str, prefix: str = "{tandem}:workers", *, ttl_s: float = TTL_S, timeout_s: float = 0.5
    ) -> None:
        self._key = prefix
        self._ttl_ms = max(1, round(ttl_s * 1000))
        self._timeout_s = timeout_s
        self._client = connect(url)
        self._has_complained = False

    async def announce(self, record: WorkerRecord) -> None:
        check_record(record)
        await self._run(_ANNOUNCE, _name(record), _encoded(record), self._ttl_ms)

    async def withdraw(self, record: WorkerRecord) -> None:
        await self._run(_WITHDRAW, _name(record), _encoded(record))

    async def workers(self) -> Sequence[WorkerRecord]:
        entries = await self._run(_WORKERS, self._ttl_ms)
        records = [self._decoded(entry) for entry in entries[:MAX_WORKERS]]
        return [record for record in records if record is not None]

    async def close(self) -> None:
        await self._client.aclose()

    async def _run(self, script: str, *arguments: bytes | int) -> Any:
        try:
            async with answered_within(self._timeout_s):
                return await self._client.eval(script, 1, self._key, *arguments)
        except (RedisError, OSError) as error:
            raise LocalityUnavailableError(
                f"Redis did not list the workers ({explained(error, 'cluster')}); it is tried again"
            ) from error

    def _decoded(self, entry: object) -> WorkerRecord | None:
        try:
            return decode_record(entry)
        except InvalidRequestError as error:
            if not self._has_complained:
                self._has_complained = True
                _LOG.warning("an entry of %s in Redis is no worker and is ignored: %s", self._key, error)
            return None


def decode_record(entry: object) -> WorkerRecord:
    """Read what `announce` wrote.

    Raises:
        InvalidRequestError: it is something else.
    """
    try:
        fields = json.loads(entry) if isinstance(entry, str | bytes) else None
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{shown(entry)} is not JSON: {error}") from error
    names = {"worker_id", "address", "incarnation", "role", "model", "pool"}
    if not isinstance(fields, dict) or not all(isinstance(fields.get(name), str) for name in names):
        raise InvalidRequestError(f"{shown(entry)} lacks one of {', '.join(sorted(names))} as text")
    worker = WorkerAddress(fields["worker_id"], fields["address"], fields["incarnation"])
    record = WorkerRecord(worker, role=fields["role"], model=fields["model"], pool=fields["pool"])
    check_record(record)
    return record


def _name(record: WorkerRecord) -> bytes:
    return record.worker.worker_id.encode("utf-8", "surrogatepass")


def _encoded(record: WorkerRecord) -> bytes:
    own = {"role": record.role, "model": record.model, "pool": record.pool}
    return json.dumps({**dataclasses.asdict(record.worker), **own}).encode()
