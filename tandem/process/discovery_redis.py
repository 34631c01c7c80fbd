"""Discovery in Redis: one hash of worker records, each with its expiry by Redis' own clock.

Invariant: no record outlives `ttl_s` without announcements. Records, including their expiry, are sealed with the
cluster's secret; any other data under the key is ignored or replaced. A Redis that is unreachable, slow or full raises
`LocalityUnavailableError` within the timeout.
"""

import dataclasses
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import islice

from redis.exceptions import RedisError

from tandem.core.errors import InvalidRequestError, LocalityUnavailableError, shown
from tandem.process.discovery import MAX_WORKERS, TTL_S, check_record
from tandem.process.seals import RecordSealer
from tandem.redis_client import answered_within, connect, explained
from tandem.rpc.credentials import Credentials
from tandem.rpc.messages import WorkerAddress, WorkerRecord

_LOG = logging.getLogger(__name__)

# Each entry is "<milliseconds until which it counts>|<seal>|<JSON>". One script a call, so each call is atomic.
_COMMON = """
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'hash' and kind ~= 'none' then redis.call('DEL', KEYS[1]) end
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
"""
# NOTE: an entry of a later run of the worker's process is kept while it counts; the JSON ends with the epoch.
ANNOUNCE = (
    _COMMON
    + """
local until_ms, epoch = string.match(redis.call('HGET', KEYS[1], ARGV[1]) or '', '^(%d+)|%x+|.*"epoch": (%d+)}$')
local is_fresh = until_ms and tonumber(until_ms) > now_ms and tonumber(until_ms) <= now_ms + tonumber(ARGV[3])
local is_later = is_fresh and ARGV[4] ~= '0' and tonumber(epoch) > tonumber(ARGV[4])
if not is_later then redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
"""
)
WITHDRAW = (
    _COMMON
    + """
local entry = redis.call('HGET', KEYS[1], ARGV[1])
if entry and string.match(entry, '^%d+|%x+|(.*)$') == ARGV[2] then redis.call('HDEL', KEYS[1], ARGV[1]) end
"""
)
WORKERS = (
    _COMMON
    + """
local entries, found = redis.call('HGETALL', KEYS[1]), {}
for i = 1, #entries, 2 do
  local until_ms = string.match(entries[i + 1], '^(%d+)|')
  if not until_ms then
    table.insert(found, entries[i])
    table.insert(found, '')
    redis.call('HDEL', KEYS[1], entries[i])
  elseif tonumber(until_ms) > now_ms + tonumber(ARGV[1]) or tonumber(until_ms) <= now_ms then
    redis.call('HDEL', KEYS[1], entries[i])
  else
    table.insert(found, entries[i])
    table.insert(found, entries[i + 1])
  end
end
return found
"""
)


class RedisDiscovery:
    """`Discovery` in one Redis (7.0 or newer), shared by all routers and workers of a deployment.

    Args:
        url: `redis://`, `rediss://` or `unix://` URL.
        credentials: credentials of this process; their secret seals the records.
        prefix: name of the deployment, used as the key of the hash.
        ttl_s: validity of an announcement.
        timeout_s: timeout of every call, connecting included.
        on_refused: called for each record that is refused because of its seal.

    Raises:
        ConfigurationError: the URL is invalid. Does not connect to Redis.
    """

    def __init__(
        self,
        url: str,
        credentials: Credentials,
        prefix: str = "{tandem}:workers",
        *,
        ttl_s: float = TTL_S,
        timeout_s: float = 0.5,
        on_refused: Callable[[], None] | None = None,
    ) -> None:
        self._key = prefix
        self._sealer = RecordSealer(credentials, "worker")
        self._on_refused = on_refused
        self._ttl_ms = max(1, round(ttl_s * 1000))
        self._timeout_s = timeout_s
        self._client = connect(url)
        self._has_complained = False

    async def announce(self, record: WorkerRecord) -> None:
        check_record(record)
        name = _name(record)
        async with self._answering():
            seconds, microseconds = await self._client.time()
            until_ms = seconds * 1000 + microseconds // 1000 + self._ttl_ms
            sealed = self._sealer.seal(name, until_ms, _encoded(record))
            await self._client.eval(ANNOUNCE, 1, self._key, name, sealed, self._ttl_ms, record.epoch)

    async def withdraw(self, record: WorkerRecord) -> None:
        async with self._answering():
            await self._client.eval(WITHDRAW, 1, self._key, _name(record), _encoded(record))

    async def workers(self) -> Sequence[WorkerRecord]:
        async with self._answering():
            found = await self._client.eval(WORKERS, 1, self._key, self._ttl_ms)
        entries = zip(found[::2], found[1::2], strict=True)
        records = [self._opened(name, entry) for name, entry in islice(entries, MAX_WORKERS)]
        return [record for record in records if record is not None]

    async def close(self) -> None:
        await self._client.aclose()

    @asynccontextmanager
    async def _answering(self) -> AsyncIterator[None]:
        try:
            async with answered_within(self._timeout_s):
                yield
        except (RedisError, OSError) as error:
            raise LocalityUnavailableError(
                f"Redis did not list the workers ({explained(error, 'cluster')}); it is tried again"
            ) from error

    def _opened(self, name: bytes, entry: bytes) -> WorkerRecord | None:
        try:
            return decode_record(self._sealer.opened(name, entry))
        except InvalidRequestError as error:
            if self._on_refused is not None:
                self._on_refused()
            if not self._has_complained:
                self._has_complained = True
                _LOG.warning("an entry of %s in Redis is no worker and is ignored: %s", self._key, error)
            return None


def decode_record(entry: object) -> WorkerRecord:
    """Parses a record that `announce` wrote.

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
    epoch = fields.get("epoch", 0)  # NOTE: the release before writes none
    if type(epoch) is not int:
        raise InvalidRequestError(f"epoch={shown(epoch)} is no integer")
    worker = WorkerAddress(fields["worker_id"], fields["address"], fields["incarnation"])
    record = WorkerRecord(worker, role=fields["role"], model=fields["model"], pool=fields["pool"], epoch=epoch)
    check_record(record)
    return record


def _name(record: WorkerRecord) -> bytes:
    return record.worker.worker_id.encode("utf-8", "surrogatepass")


def _encoded(record: WorkerRecord) -> bytes:
    own = {"role": record.role, "model": record.model, "pool": record.pool, "epoch": record.epoch}
    return json.dumps({**dataclasses.asdict(record.worker), **own}).encode()
