"""Callers and bills: isolates the cached state of each caller and bills its requests.

A tenant is a customer with one or more keys; the keys of a cache group share cached state. `edge` stores a request's
`Caller`; `answer` bills the request through its `Bill`. Invariant: every request of a key is settled once, however it
ends; cached state of a key's requests is reachable only from the same tenant or cache group. Without accounts every
request has the same anonymous caller and nothing is billed.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from starlette.types import Scope

from tandem.accounts.accounts import Accounts, Reservation
from tandem.accounts.charge import ChargeOutcome
from tandem.accounts.errors import NotAllowedError
from tandem.accounts.key import AccountKey
from tandem.accounts.usage import Usage
from tandem.core.errors import shown
from tandem.core.scope import CacheScope
from tandem.gateway.accounts_headers import limit_headers
from tandem.gateway.accounts_usage import most_usage, usage_of_results
from tandem.gateway.dialect import ParsedRequest
from tandem.gateway.request import ChoiceEnd, ServeRequest

_STATE_KEY = "tandem.caller"


@dataclass(frozen=True, slots=True)
class Caller:
    """The client that sent a request, identified by its API key; without one, an open gateway's anonymous client."""

    key: AccountKey | None = None
    accounts: Accounts | None = None

    @property
    def tenant(self) -> str:
        """The tenant whose history and stored answers the caller may see; empty for an open gateway's only one."""
        return "" if self.key is None else self.key.tenant

    @property
    def is_operator(self) -> bool:
        """Whether the caller may see the requests of all tenants."""
        return self.key is None or self.key.is_admin

    def isolate(self, scope: CacheScope) -> CacheScope:
        """Returns the scope with its salt made unique to the caller's tenant or cache group."""
        key = self.key
        if key is None:
            return scope
        owner = ("group", key.cache_group) if key.cache_group is not None else ("tenant", key.tenant)
        return replace(scope, salt=_digest(*owner, scope.salt))

    def isolated(self, request: ServeRequest) -> ServeRequest:
        """Returns the request with its cache salt and session id made unique to the caller's tenant or cache group."""
        if self.key is None:
            return request
        session = request.session_id
        return replace(
            request,
            scope=self.isolate(request.scope),
            session_id=None if session is None else _digest("session", self.key.tenant, session),
        )

    def bill(self, request_id: str) -> "Bill":
        """Opens the bill of one request; nothing is reserved yet."""
        return Bill(self, request_id)


@dataclass(slots=True)
class Bill:
    """Bill of one request: `reserve` once its body is parsed; `settle` before the last byte of an answer that ended
    well; `close` after an error or when the client leaves.
    """

    caller: Caller
    request_id: str
    headers: Mapping[str, str] = field(default_factory=dict)
    _asked: ParsedRequest | None = None
    _held: Reservation | None = None

    async def reserve(
        self, asked: ParsedRequest, max_model_len: int | None, *, is_anthropic: bool, was_heard: Callable[[], bool]
    ) -> None:
        """Reserves in the account store the most that `asked` may use; afterwards `headers` hold the remaining limits.

        Args:
            max_model_len: tokens of the context; None: not known.
            was_heard: whether the client got the beginning of an answer; until then nothing is billed.

        Raises:
            NotAllowedError: the key may not use this model.
            TandemError: as `Accounts.reserve`.
        """
        key, accounts, request = self.caller.key, self.caller.accounts, asked.request
        if key is None or accounts is None:
            return
        if not key.allows(request.model):
            raise NotAllowedError(
                f"this API key may not use the model {shown(request.model)}; it may use {', '.join(key.models)}"
            )
        self._asked = asked
        self._held = accounts.charge(
            key, self.request_id, request.model, self._billed(most_usage(request, max_model_len))
        )
        self._held.delivered = lambda: self._usage() if was_heard() else Usage()
        await accounts.reserve(self._held)
        self.headers = limit_headers(self._held.rate_limits, is_anthropic=is_anthropic)

    async def settle(self) -> None:
        """Bills a request that ended well; waits for the store, so that the next request sees the new balance."""
        if self._held is not None and self.caller.accounts is not None:
            await self.caller.accounts.settle_and_wait(self._held, self._usage(), ChargeOutcome.DONE)

    def close(self, ends: Mapping[int, ChoiceEnd], *, is_abort: bool, was_heard: bool) -> None:
        """Bills a request that failed or was aborted; does nothing if it was settled. A failed request costs nothing if
        its client received no part of an answer.

        Args:
            ends: how its choices ended, by index; their token counts may exceed those of the results.
            is_abort: the client left; the tokens generated for it are billed.
            was_heard: the client received the beginning of an answer.
        """
        if self._held is None or self.caller.accounts is None:
            return
        usage = self._usage(ends) if is_abort or was_heard else Usage()
        outcome = (
            ChargeOutcome.ABORTED if is_abort else ChargeOutcome.FAILED if usage != Usage() else ChargeOutcome.REFUNDED
        )
        self.caller.accounts.settle(self._held, usage, outcome)

    def _usage(self, ends: Mapping[int, ChoiceEnd] = MappingProxyType({})) -> Usage:
        assert self._asked is not None
        generated = {index: end.num_output_tokens for index, end in ends.items()}
        return self._billed(usage_of_results(self._asked.request, self._asked.results, generated))

    def _billed(self, usage: Usage) -> Usage:
        assert self._asked is not None
        return replace(usage, num_output=0) if self._asked.is_prompt_only else usage


def caller_of(scope: Scope) -> Caller:
    """The caller that `set_caller` stored in `scope`; the anonymous caller where none was stored."""
    found = scope.get(_STATE_KEY)
    return found if isinstance(found, Caller) else Caller()


def set_caller(scope: Scope, caller: Caller) -> None:
    """Stores the authenticated caller in the request's scope, for `caller_of`."""
    scope[_STATE_KEY] = caller


def _digest(*fields: str) -> str:
    """Fields are length-prefixed, so no two lists of them share an encoding."""
    digest = hashlib.sha256(b"tandem-caller-1:")
    for text in fields:
        encoded = text.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()
