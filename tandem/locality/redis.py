"""Locality index in Redis, shared by all routers and workers of a deployment. One round trip per operation.

Every operation is one atomic Lua script (`lua/`); only refreshing a long chain takes several, so that no call blocks
Redis for long. Keys share a `{hash tag}` and a time to live. A Redis that is unreachable, slow, full or holds invalid
data raises `LocalityUnavailableError` and nothing else.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from importlib import resources
from typing import Any, TypeVar, cast

from redis import Redis
from redis.backoff import NoBackoff
from redis.client import Pipeline
from redis.connection import Connection
from redis.exceptions import NoScriptError, ReadOnlyError, RedisError
from redis.retry import Retry
from redis.sentinel import Sentinel

from tandem.core.addresses import check_host
from tandem.core.clock import Clock, SystemClock
from tandem.core.errors import ConfigurationError, LocalityUnavailableError
from tandem.core.events import BlockEvent
from tandem.core.hashing import resume_name
from tandem.core.machine import random_bytes
from tandem.locality.base import (
    DEFAULT_MAX_BLOCK_REPLICAS,
    KEY_BYTES,
    LocalityStats,
    PublishResult,
    check_hashes,
    check_limit,
    check_report,
    net_changes,
)
from tandem.redis_client import explained, not_understood
from tandem.sentinel_url import SentinelUrl

_KEYS_PER_CALL = 512  # of a script, so that none blocks Redis for long
_CALLS_PER_PIPELINE = 32
_SNAPSHOT_ATTEMPTS = 3
_NAME_BYTES = 8
_SCRIPTS = ("publish", "begin", "stage", "commit", "remove", "stats", "leading", "resumable", "age")
_Item = TypeVar("_Item")


class RedisIndex:
    """`LocalityIndex` (see `base`) in one Redis (7.0 or newer; one hash slot of a cluster). Any thread may call.

    For up to 7000 workers: if more of them hold a block, its look-up omits all of them.

    Args:
        url: as for `tandem.redis_client.connect`.
        prefix: key prefix of the deployment; must contain a `{hash tag}`.
        max_block_replicas: the most (block, worker) pairs kept; about 75 bytes of Redis each. The value of the client
            that looked up last applies to all clients of a prefix: routers look up, workers only report.
        ttl_s: time without reports after which the keys expire, and a silent worker is removed.
        read_timeout_s: timeout of a look-up.
        write_timeout_s: timeout of a report.
        retry_after_s: after a failed look-up, further ones fail at once for this long.
        connection_class: opens connections to a server that no sentinel names.
        background: runs `_make_recent` for the rest of long chains, after their look-up; default: a thread. Closed
            with the index.
    """

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "{tandem}:locality",
        max_block_replicas: int = DEFAULT_MAX_BLOCK_REPLICAS,
        ttl_s: float = 600.0,
        read_timeout_s: float = 0.05,
        write_timeout_s: float = 2.0,
        retry_after_s: float = 1.0,
        clock: Clock | None = None,
        connection_class: type[Connection] = Connection,
        background: Executor | None = None,
    ) -> None:
        check_limit(max_block_replicas)
        if not 0 <= prefix.find("{") < prefix.find("}") - 1:
            raise ConfigurationError(f"prefix={prefix!r} has no hash tag; write it like '{{name}}:locality'")
        self._max_block_replicas = max_block_replicas
        self._half = max_block_replicas // 2
        self._ttl_ms = max(1, round(ttl_s * 1000))
        self._keys = (f"{prefix}:meta", f"{prefix}:young", f"{prefix}:old")
        self._reader = _connect(url, read_timeout_s, connection_class)
        self._writer = _connect(url, write_timeout_s, connection_class)
        self._scripts = _load_scripts()
        self._digests = {name: hashlib.sha1(text).hexdigest() for name, text in self._scripts.items()}
        self._retry_after_s = retry_after_s
        self._clock = clock or SystemClock()
        self._away_until_s = float("-inf")
        self._background = background or ThreadPoolExecutor(1, thread_name_prefix="locality ageing")
        self._ageing: Future[None] | None = None

    def publish(self, worker_id: str, epoch: int, events: Sequence[BlockEvent], sequence: int) -> PublishResult:
        check_report(worker_id, epoch, sequence)
        parts = list(_parts(list(net_changes(events).items()))) or [[]]
        header, limits = self._header(worker_id, epoch), (self._ttl_ms, self._half)
        calls = [
            [*header, sequence, int(part is parts[-1]), _packed(part, True), _packed(part, False), *limits]
            for part in parts
        ]
        return self._write("publish", calls)

    def replace(self, worker_id: str, epoch: int, hashes: Iterable[bytes], sequence: int) -> PublishResult:
        check_report(worker_id, epoch, sequence)
        hashes = list(hashes)
        check_hashes(hashes)
        keys = list(dict.fromkeys(block_hash[:KEY_BYTES] for block_hash in hashes))
        for _ in range(_SNAPSHOT_ATTEMPTS):
            result = self._replace_once(worker_id, epoch, keys, sequence)
            if result is not PublishResult.RESYNC:
                break
        return result

    def leading_blocks(self, hashes: Sequence[bytes]) -> Mapping[str, int]:
        check_hashes(hashes)
        answer, first, end = self._asked("leading", [b"".join(hashes), self._half])
        if first < end and (self._ageing is None or self._ageing.done()):
            self._ageing = self._background.submit(self._make_recent, hashes[first:end])
        return _decoded(answer)

    def resumable_blocks(self, hashes: Sequence[bytes], leading: Mapping[str, int]) -> Mapping[str, int]:
        check_hashes(hashes)
        chain = hashes[: max(leading.values(), default=0)]
        keys = b"".join(resume_name(block_hash)[:KEY_BYTES] for block_hash in chain)
        counts = [part for name, count in leading.items() for part in (_encoded(name), count)]
        return _decoded(self._asked("resumable", [keys, self._half, *counts]))

    def remove_worker(self, worker_id: str) -> None:
        self._run(self._writer, "remove", [[_encoded(worker_id)]])

    def stats(self) -> LocalityStats:
        (answer,) = self._run(self._reader, "stats", [[]])
        num_workers, num_blocks, num_block_replicas, num_rotations = answer
        return LocalityStats(num_workers, num_blocks, num_block_replicas, self._max_block_replicas, num_rotations)

    def close(self) -> None:
        """Drop the connections."""
        self._reader.close()
        self._background.shutdown()
        self._writer.close()

    def _asked(self, script: str, arguments: Sequence[Any]) -> Any:
        """Result of a look-up. After one that failed, others fail at once for a while."""
        if self._clock.now_s() < self._away_until_s:
            raise LocalityUnavailableError("Redis did not answer a moment ago; it is tried again shortly")
        try:
            (answer,) = self._run(self._reader, script, [arguments])
        except LocalityUnavailableError:
            self._away_until_s = self._clock.now_s() + self._retry_after_s
            raise
        return answer

    def _make_recent(self, hashes: Sequence[bytes]) -> None:
        """Move the rest of a long looked-up chain to the recent generation, in pieces between which other calls run.

        If a piece fails, the next look-up of the chain starts again.
        """
        keys = [block_hash[:KEY_BYTES] for block_hash in hashes]
        with contextlib.suppress(LocalityUnavailableError):
            for start in range(0, len(keys), _KEYS_PER_CALL):
                part = keys[start : start + _KEYS_PER_CALL]
                (is_done,) = self._run(self._writer, "age", [[b"".join(part), self._half, 0]])
                if not is_done:  # NOTE: in one piece, since the rest is forgotten with the old generation
                    self._run(self._writer, "age", [[b"".join(keys[start:]), self._half, 1]])
                    return

    def _replace_once(self, worker_id: str, epoch: int, keys: Sequence[bytes], sequence: int) -> PublishResult:
        (slot,) = self._run(self._writer, "begin", [[*self._header(worker_id, epoch), self._ttl_ms]])
        if not isinstance(slot, int):
            return PublishResult.STALE
        header = [random_bytes(_NAME_BYTES).hex(), _encoded(worker_id), slot]
        calls = [[*header, b"".join(part), self._ttl_ms, self._half] for part in _parts(keys)]
        for start in range(0, len(calls), _CALLS_PER_PIPELINE):
            if self._write("stage", calls[start : start + _CALLS_PER_PIPELINE]) is PublishResult.RESYNC:
                return PublishResult.RESYNC
        return self._write("commit", [[*header, sequence, self._ttl_ms]])

    def _header(self, worker_id: str, epoch: int) -> list[Any]:
        """Returns a name for a generation, if a new one is needed; the worker id; its epoch, comparable as text."""
        return [random_bytes(_NAME_BYTES).hex(), _encoded(worker_id), f"{epoch:020d}"]

    def _write(self, script: str, calls: Sequence[Sequence[Any]]) -> PublishResult:
        """Run a script for each call; APPLIED if every call was applied."""
        answers = {bytes(answer).decode() for answer in self._run(self._writer, script, calls)}
        return next((result for result in _WORST_FIRST if result.value in answers), PublishResult.RESYNC)

    def _run(self, client: Redis, script: str, calls: Sequence[Sequence[Any]]) -> list[Any]:
        """Run a script in one round trip, or two if Redis has not cached it. All scripts are idempotent."""
        try:
            try:
                return self._send(client, self._digests[script], calls)
            except NoScriptError:
                return self._send(client, client.script_load(self._scripts[script]), calls)
        except (RedisError, OSError) as error:
            if isinstance(error, ReadOnlyError):  # NOTE: a master no more; its address may be another's by now
                client.connection_pool.disconnect(inuse_connections=False)
            raise LocalityUnavailableError(
                f"Redis did not run {script!r} ({explained(error, 'cluster')}); go on without hints"
            ) from error

    def _send(self, client: Redis, digest: str, calls: Sequence[Sequence[Any]]) -> list[Any]:
        if len(calls) == 1:
            return [client.evalsha(digest, len(self._keys), *self._keys, *calls[0])]
        pipeline: Pipeline = client.pipeline(transaction=False)
        for call in calls:
            pipeline.evalsha(digest, len(self._keys), *self._keys, *call)
        return pipeline.execute()


_WORST_FIRST = (PublishResult.STALE, PublishResult.RESYNC, PublishResult.APPLIED)


def _connect(url: str, timeout_s: float, connection_class: type[Connection]) -> Redis:
    """A client that connects when first used, again after a loss, and waits for no answer longer than `timeout_s`."""
    options = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "driver_info": None,  # NOTE: as in `redis_client.connect`
        "retry": Retry(NoBackoff(), 0),
    }
    try:
        if SentinelUrl.is_one(url):
            return _master(url, options)
        is_plain = url.startswith("redis://")  # NOTE: other schemes have classes of their own
        client = Redis.from_url(url, **options, **({"connection_class": connection_class} if is_plain else {}))
        check_host(client.connection_pool.connection_kwargs.get("host", ""))
        return client
    except ValueError:  # NOTE: which may quote a part of a password
        raise not_understood(url) from None


def _master(url: str, options: dict[str, Any]) -> Redis:
    where = SentinelUrl.parse(url)
    sentinels: Any = Sentinel(  # type: ignore[no-untyped-call]
        where.addresses, sentinel_kwargs={**where.sentinel_options(), **options}
    )
    return cast(Redis, sentinels.master_for(where.service, **where.master_options(), **options))


def _load_scripts() -> dict[str, bytes]:
    """Returns each script, preceded by the common part."""
    folder = resources.files("tandem.locality") / "lua"
    common = (folder / "common.lua").read_bytes()
    return {name: common + (folder / f"{name}.lua").read_bytes() for name in _SCRIPTS}


def _encoded(worker_id: str) -> bytes:
    return worker_id.encode("utf-8", "surrogatepass")


def _parts(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    """Splits items into pieces small enough that no script blocks Redis for long."""
    for start in range(0, len(items), _KEYS_PER_CALL):
        yield items[start : start + _KEYS_PER_CALL]


def _packed(changes: Iterable[tuple[bytes, bool]], held: bool) -> bytes:
    return b"".join(key for key, is_held in changes if is_held == held)


def _decoded(answer: object) -> dict[str, int]:
    """Read what `leading.lua` returns."""
    try:
        return cast(dict[str, int], json.loads(cast(bytes, answer)))
    except ValueError as error:
        raise LocalityUnavailableError(f"Redis holds a damaged worker id ({error}); flush the index's keys") from error
