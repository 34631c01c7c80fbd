"""Redis client for tasks of an event loop; callers bound each call with `answered_within`.

After a failover it finds the new master: by the Sentinels that its URL names, or by reconnecting to its address once
the old master says that it is a replica.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Literal

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, ReadOnlyError

from tandem.core.addresses import check_host
from tandem.core.clock import Clock
from tandem.core.errors import ConfigurationError, shown, without_password
from tandem.sentinel_url import SentinelUrl

MAX_CONNECTIONS = 64  # of a client; each carries one question at a time
User = Literal["cluster", "gateway", "accounts"]  # as helm/tandem/files/redis-users.acl has them
_NUM_TICKS = 20
_CLOSE_S = 1.0
_SENTINEL_S = 0.2  # NOTE: of one that does not answer; within the time of a call the next one must be asked


class _Pool(ConnectionPool):
    """A connection pool whose idle connections cannot be acquired while they are being closed."""

    async def disconnect(self, inuse_connections: bool = True) -> None:
        if inuse_connections:
            await super().disconnect()
        else:
            idle, self._available_connections = self._available_connections, []
            await asyncio.gather(*(connection.disconnect() for connection in idle))


class _SentinelPool(_Pool, SentinelConnectionPool):
    """The same for the master named by Sentinels."""


class _QueueingRedis(Redis):
    """Runs at most as many calls at once as it has connections; further calls wait in order.

    NOTE: a pool raises a RedisError for them, as if Redis were unavailable. A BlockingConnectionPool waits, but when
    the task that it woke is cancelled in that moment it wakes no other: the connection stays unused until the next
    release.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._turns = asyncio.Semaphore(self.connection_pool.max_connections)

    async def aclose(self, *args: Any, **options: Any) -> None:
        """NOTE: it would wait until all that was sent is taken."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await super().aclose(*args, **options)
                if isinstance(self.connection_pool, _SentinelPool):
                    for sentinel in self.connection_pool.sentinel_manager.sentinels:
                        await sentinel.aclose()

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        async with self._turns:
            try:
                return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
            except ReadOnlyError:  # NOTE: a master no more; its address may be another's by now
                await self.connection_pool.disconnect(inuse_connections=False)
                raise


class Outage:
    """Whether a store's Redis is taken to be away. Meanwhile no call should be made: each would wait for a timeout.

    A call that fails while others are answered is one slow connection, and begins no outage.

    Args:
        pause_s: seconds after a failed call in which none is made.
    """

    def __init__(self, clock: Clock, pause_s: float) -> None:
        self._clock, self._pause_s = clock, pause_s
        self._until_s: float | None = None
        self.num_answers = 0

    @property
    def is_on(self) -> bool:
        """Whether calls should fail at once."""
        return self._until_s is not None and self._clock.now_s() < self._until_s

    def note_failure(self, num_answers: int) -> bool:
        """Record a call that failed; returns whether an outage began. `num_answers`: as it was when the call began."""
        if self.num_answers != num_answers:
            return False
        has_begun = self._until_s is None
        self._until_s = self._clock.now_s() + self._pause_s
        return has_begun

    def note_answer(self) -> bool:
        """Record a call that was answered; returns whether an outage ended."""
        has_ended = self._until_s is not None
        self._until_s = None
        self.num_answers += 1
        return has_ended


@contextlib.asynccontextmanager
async def answered_within(limit_s: float) -> AsyncIterator[None]:
    """Bounds the block by how long Redis is silent, not by how long this loop is too busy to hear it.

    NOTE: a twentieth of the limit that takes longer counts as a twentieth. The loop has read its sockets between any
    two.

    Raises:
        TimeoutError: the limit is over.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as timeout:
        timer: asyncio.TimerHandle

        def wait(num_ticks: int) -> None:
            nonlocal timer
            if num_ticks:
                timer = loop.call_later(limit_s / _NUM_TICKS, wait, num_ticks - 1)
            else:
                timeout.reschedule(loop.time())

        wait(_NUM_TICKS)
        try:
            yield
        finally:
            timer.cancel()


def explained(error: Exception, user: User) -> str:
    """Message of a Redis or network error; if Redis refused the URL's user, with the remedy.

    Args:
        user: the user whose rules allow the call.
    """
    # NOTE: what is refused within a script has no error class of its own
    is_refused = isinstance(error, AuthenticationError | NoPermissionError) or "user executing the script" in str(error)
    if not is_refused:
        return str(error)
    return (
        f"{error}; give the URL the user that may do this, redis://{user}:PASSWORD@host:port, "
        "with the rules of helm/tandem/files/redis-users.acl"
    )


def not_understood(url: str) -> ConfigurationError:
    """Error for an invalid URL. NOTE: without its options, which may be passwords, even misspelt ones."""
    return ConfigurationError(
        f"Redis URL {shown(without_password(url).partition('?')[0])} is not understood; "
        "write redis://host:port or redis+sentinel://host:port,host:port/service, "
        "and / ? # of a password as %2F %3F %23"
    )


def connect(url: str, *, num_retries: int = 0) -> Redis:
    """A client that connects when first used and reconnects after a loss. Any number of calls may run at once.

    Args:
        url: `redis://`, `rediss://` or `unix://`, or as for `SentinelUrl`.

    NOTE: it has no timeout of its own for calls. That one is an `asyncio.wait_for` around each send, which before
    Python 3.12 loses a cancellation that arrives together with its result: a task that repeats calls would never end.

    Raises:
        ConfigurationError: the URL is invalid. It is not checked whether Redis is available.
    """
    options = {
        "max_connections": MAX_CONNECTIONS,
        "socket_timeout": None,
        "socket_connect_timeout": None,
        "driver_info": None,  # NOTE: else connections begin with CLIENT SETINFO, which no user may
        "retry": Retry(NoBackoff(), num_retries),
    }
    try:
        pool = _sentinel_pool(url, options) if SentinelUrl.is_one(url) else _Pool.from_url(url, **options)
        check_host(pool.connection_kwargs.get("host", ""))
    except ValueError:  # NOTE: which may quote a part of a password
        raise not_understood(url) from None
    return _QueueingRedis.from_pool(pool)


def _sentinel_pool(url: str, options: dict[str, Any]) -> _SentinelPool:
    where = SentinelUrl.parse(url)
    # NOTE: without retries, or one Sentinel that is down is asked for seconds and the next never
    limits = {
        "socket_timeout": _SENTINEL_S,
        "socket_connect_timeout": _SENTINEL_S,
        "retry": Retry(NoBackoff(), 0),
    }
    sentinels: Any = Sentinel(  # type: ignore[no-untyped-call]
        where.addresses, sentinel_kwargs={**where.sentinel_options(), **limits}
    )
    return _SentinelPool(  # type: ignore[no-untyped-call]
        where.service, sentinels, **where.master_options(), **options
    )
