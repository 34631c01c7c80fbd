"""Account store in one Redis, shared by all gateways of a deployment; `store` describes its methods.

Invariant: a charge is reserved, settled, renewed or expired by one script, so atomically; a call for many charges runs
one script after another. Settled charges are remembered for a day: a settlement repeated later would be billed again.
Redis must be persistent (AOF or snapshots): it has the only copy of keys and spending. Content of another form than the
scripts write is reported by its place; it concerns its own account only.
"""

import asyncio
import contextlib
import functools
import itertools
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

from redis.exceptions import NoPermissionError, RedisError, ResponseError

from tandem.accounts.charge import Charge, ChargeSettlement, LedgerEntry, Renewal, Total
from tandem.accounts.errors import AccountsUnavailableError
from tandem.accounts.key import AccountKey
from tandem.accounts.key_cache import MAX_KEYS
from tandem.accounts.ledger_query import MAX_ENTRIES, LedgerQuery
from tandem.accounts.rate_limit_state import RateLimitState
from tandem.accounts.redis_scripts import EXPIRE, OVERDUE, RENEW, RESERVE, SETTLE, SPENDING
from tandem.accounts.refusals import refusal
from tandem.accounts.store import KEPT_DAYS, LEASE_S, Spending
from tandem.accounts.usage import Usage
from tandem.core.clock import Clock
from tandem.core.errors import InvalidRequestError
from tandem.redis_client import Outage, answered_within, connect, explained

_REMEMBERED_S = 24 * 3600  # charges that were settled; each takes 150 bytes of Redis
_DAY_S = 24 * 3600
_PAGE = 1000
_RENEWED_AT_ONCE = 200  # NOTE: each has its checkpoint with it; a script holds up everybody else
_PAUSE_S = 0.5
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, RecursionError, InvalidRequestError)
_COUNTS = ("num_input", "num_written_5m", "num_written_1h", "num_read", "num_output")


_logger = logging.getLogger(__name__)


class RedisAccounts:
    """An `AccountStore` in one Redis (7.0 or newer).

    Args:
        url: as for `redis_client.connect`.
        clock: times the pause after a failure, and with `uses_local_time` limits and leases.
        uses_local_time: limits and leases use `clock` instead of Redis' time; for tests.
        prefix: names the deployment; its braces keep all keys in one slot.
        timeout_s: of every script or command, connecting included.

    Raises:
        ConfigurationError: the URL is not understood. Redis is not contacted yet.
    """

    def __init__(
        self,
        url: str,
        clock: Clock,
        *,
        uses_local_time: bool = False,
        prefix: str = "{tandem:accounts}",
        timeout_s: float = 0.5,
        lease_s: float = LEASE_S,
        max_entries: int = MAX_ENTRIES,
    ) -> None:
        self._clock = clock
        self._uses_local_time = uses_local_time
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._lease_ms = round(lease_s * 1000)
        self._max_entries = max_entries
        self._outage = Outage(clock, _PAUSE_S)
        self._client = connect(url)
        self._reserve = self._client.register_script(RESERVE)
        self._settle = self._client.register_script(SETTLE)
        self._renew = self._client.register_script(RENEW)
        self._spending = self._client.register_script(SPENDING)
        self._expire = self._client.register_script(EXPIRE)
        self._overdue = self._client.register_script(OVERDUE)
        # NOTE: gateways ask again and again for all keys they know, of which few change.
        self._decoded = functools.lru_cache(2 * MAX_KEYS)(_decoded)
        self._damaged: set[str] = set()  # keys of which that was logged

    def start(self) -> None: ...

    async def close(self) -> None:
        await self._client.aclose()

    async def add_key(self, key: AccountKey) -> None:
        await self._ask(lambda: self._client.hset(self._name("keys"), key.key_id, encoded_key(key)))

    async def find_keys(self, key_ids: Sequence[str]) -> Mapping[str, AccountKey]:
        if not key_ids:
            return {}
        values = await self._ask(lambda: self._client.hmget(self._name("keys"), list(key_ids)))
        return {key.key_id: key for key in self._readable(zip(key_ids, values, strict=True))}

    async def all_keys(self) -> Sequence[AccountKey]:
        found = await self._ask(lambda: self._client.hgetall(self._name("keys")))
        keys = self._readable((field.decode(errors="replace"), value) for field, value in found.items())
        return sorted(keys, key=lambda key: (key.created_s, key.key_id))

    async def revoke_key(self, key_id: str, now_s: int) -> bool:
        key = (await self.find_keys([key_id])).get(key_id)
        if key is not None and key.is_live:
            await self._ask(lambda: self._client.sadd(self._name("revoked"), key_id))
            await self.add_key(key.revoked(now_s))
        return key is not None

    async def reserve(self, charge: Charge) -> RateLimitState:
        key = charge.key
        limits = key.limits
        names = [*self._names(key.key_id), self._name(f"settled:{charge.charge_id}"), self._name("revoked")]
        asked = (
            *(self._now(), key.key_id, charge.charge_id, self._lease_ms, charge.cost_nanos),
            *map(_or_empty, (limits.budget_nanos, limits.concurrency)),
            *charge.amounts,
            *map(_or_empty, limits.rates),
        )
        why, wait_ms, left, *levels = await self._ask(lambda: self._reserve(names, asked))
        rate_limits = RateLimitState.of(limits.rates, [int(level) for level in levels])
        if why == b"settled":
            raise AccountsUnavailableError("this request was given up before the store of accounts heard of it", 1.0)
        if why != b"ok":
            raise refusal(why.decode(), charge, float(wait_ms), int(left), rate_limits)
        return rate_limits

    async def settle(self, settlement: ChargeSettlement) -> None:
        entry = settlement.entry
        asked = (
            *(self._now(), entry.charge_id, self._bill(entry), int(settlement.is_granted)),
            *settlement.reserved,
            *settlement.used,
            *map(_or_empty, settlement.rates),
        )
        await self._ask(lambda: self._settle(self._names(entry.key_id), asked))

    async def renew(self, renewals: Sequence[Renewal]) -> None:
        by_key: dict[str, list[Renewal]] = {}
        for renewal in renewals:
            by_key.setdefault(renewal.charge.key.key_id, []).append(renewal)
        await _each(
            partial(self._renew_page, key_id, found[start : start + _RENEWED_AT_ONCE])
            for key_id, found in by_key.items()
            for start in range(0, len(found), _RENEWED_AT_ONCE)
        )

    async def expire(self) -> None:
        asked = (self._now(), _PAGE)
        overdue = await self._ask(lambda: self._overdue([self._name("leases")], asked))
        await _each(partial(self._expire_key, key_id.decode(errors="replace")) for key_id in overdue)

    async def spending(self, key_id: str) -> Spending:
        spent, held, num_open = await self._ask(lambda: self._spending(self._names(key_id), (self._now(),)))
        return Spending(int(spent), int(held), int(num_open))

    async def incarnation(self) -> str:
        """The id of the Redis process. NOTE: it changes after a restart and after a failover."""
        info = await self._ask(lambda: self._client.info("server"))
        return str(info.get("run_id", ""))

    async def entries(self, query: LedgerQuery) -> Sequence[LedgerEntry]:
        found: list[LedgerEntry] = []
        end = "+"
        while len(found) < query.limit:
            page = await self._entries_before(end)
            found += await asyncio.to_thread(_wanted, self._name("ledger"), page, query)
            if len(page) < _PAGE:
                break
            end = f"({page[-1][0].decode()}"
        return found[: query.limit][::-1]

    async def totals(self, since_day: str | None = None, until_day: str | None = None) -> Sequence[Total]:
        found = await self._ask(lambda: self._client.zrange(self._name("days"), 0, -1))
        days = [day.decode(errors="replace") for day in found]
        totals: list[Total] = []
        for day in days:
            if (since_day or "") <= day <= (until_day or "~"):
                fields = await self._totals_of(day)
                with _reading(self._name(f"totals:{day}")):
                    totals += await asyncio.to_thread(_totals, day, fields)
        return totals

    def _readable(self, records: Iterable[tuple[str, bytes | None]]) -> Iterator[AccountKey]:
        """Keys from their ids and records; logs each that is damaged once, and passes over it."""
        for key_id, value in records:
            if value is None:
                continue
            try:
                yield self._decoded(value)
            except _UNREADABLE as error:
                if key_id not in self._damaged:
                    self._damaged.add(key_id)
                    where = f"{key_id} of {self._name('keys')}"
                    _logger.error("%s is damaged, so the key is unknown: %r; restore or delete it", where, error)

    async def _renew_page(self, key_id: str, renewals: Sequence[Renewal]) -> None:
        asked = (self._now(), self._lease_ms, *itertools.chain.from_iterable(map(self._renewed, renewals)))
        await self._ask(lambda: self._renew(self._names(key_id), asked))

    def _renewed(self, renewal: Renewal) -> Sequence[int | str]:
        charge, checkpoint = renewal.charge, renewal.checkpoint
        bill = "" if checkpoint is None else self._bill(checkpoint)
        return charge.charge_id, charge.cost_nanos, *charge.amounts, int(renewal.is_granted), bill

    async def _expire_key(self, key_id: str) -> None:
        await self._ask(lambda: self._expire(self._names(key_id), (self._now(),)))

    def _bill(self, entry: LedgerEntry) -> str:
        """The values that scripts add to the ledger and the totals; strings, as Lua's numbers are doubles."""
        fields = {
            "cost": entry.cost_nanos,
            "entry": json.dumps(entry.as_json()),
            "day": entry.day,
            "who": json.dumps([entry.key_id, entry.tenant, entry.model]),
            **{name: getattr(entry.usage, name) for name in _COUNTS},
            "max_entries": self._max_entries,
            "totals_s": KEPT_DAYS * _DAY_S,
            "remembered_ms": _REMEMBERED_S * 1000,
        }
        return json.dumps({name: str(value) for name, value in fields.items()})

    async def _entries_before(self, end: str) -> list[Any]:
        page = await self._ask(lambda: self._client.xrevrange(self._name("ledger"), end, "-", count=_PAGE))
        return cast(list[Any], page)

    async def _totals_of(self, day: str) -> Mapping[bytes, bytes]:
        fields = await self._ask(lambda: self._client.hgetall(self._name(f"totals:{day}")))
        return cast(Mapping[bytes, bytes], fields)

    async def _ask(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Result of a call; raises at once in an `Outage`."""
        if self._outage.is_on:
            raise AccountsUnavailableError("the store of accounts is away; it is tried again in a moment", 1.0)
        num_answers = self._outage.num_answers
        try:
            async with answered_within(self._timeout_s):
                answer = await call()
        except (RedisError, OSError) as error:
            if type(error) not in (NoPermissionError, ResponseError):  # NOTE: it answers, and may do everything else
                self._outage.note_failure(num_answers)
                await self._drop_idle()
            raise AccountsUnavailableError(
                f"the store of accounts does not answer: {explained(error, 'accounts')}", 1.0, may_have_happened=True
            ) from error
        self._outage.note_answer()
        return answer

    async def _drop_idle(self) -> None:
        """Closes idle connections. NOTE: after a restart all are broken, and each would fail one more call."""
        with contextlib.suppress(RedisError, OSError):
            async with answered_within(self._timeout_s):
                await self._client.connection_pool.disconnect(inuse_connections=False)

    def _now(self) -> int | str:
        return int(self._clock.now_s() * 1000) if self._uses_local_time else ""

    def _name(self, name: str) -> str:
        return f"{self._prefix}:{name}"

    def _names(self, key_id: str) -> list[str]:
        return [self._name(f"{part}:{key_id}") for part in ("state", "open", "held")]


async def _each(calls: Iterable[Callable[[], Awaitable[None]]]) -> None:
    """Makes all calls, whichever of them fails; raises the first failure afterwards."""
    failure: AccountsUnavailableError | None = None
    for call in calls:
        try:
            await call()
        except AccountsUnavailableError as error:
            failure = failure or error
    if failure is not None:
        raise failure


@contextlib.contextmanager
def _reading(where: str) -> Iterator[None]:
    """Raises AccountsUnavailableError with the place for a record in the block that cannot be read."""
    try:
        yield
    except _UNREADABLE as error:
        raise AccountsUnavailableError(f"{where} in Redis is damaged: {error!r}; restore or delete it", 1.0) from error


def _totals(day: str, fields: Mapping[bytes, bytes]) -> list[Total]:
    """Totals of a day. A field's name is the JSON of key, tenant and model, followed by the counter's name."""
    counted: dict[tuple[str, str, str], dict[str, int]] = {}
    for field, value in fields.items():
        who, _, name = field.decode().rpartition("]")
        key_id, tenant, model = json.loads(f"{who}]")
        counted.setdefault((key_id, tenant, model), {})[name] = int(value)
    return [
        Total(day, *who, counts["num_requests"], Usage(*(counts[name] for name in _COUNTS)), counts["cost_nanos"])
        for who, counts in sorted(counted.items())
    ]


def encoded_key(key: AccountKey) -> str:
    """Record of a key in Redis; it contains the secret's digest only."""
    return json.dumps({**key.as_json(), "digest": key.digest})


def _decoded(value: bytes) -> AccountKey:
    fields = json.loads(value)
    return AccountKey.from_json(fields, fields.pop("digest"))


def _wanted(ledger: str, page: Sequence[Any], query: LedgerQuery) -> list[LedgerEntry]:
    """Entries of a page that match the query."""
    wanted: list[LedgerEntry] = []
    for number, fields in page:
        with _reading(f"{ledger} {number.decode()}"):
            entry = LedgerEntry.from_json(json.loads(fields[b"entry"]))
            wanted += [entry] if query.matches(entry) else []
    return wanted


def _or_empty(value: int | None) -> int | str:
    return "" if value is None else value
