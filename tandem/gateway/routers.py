"""Calls to the routers. Invariant: the failure of one router loses no request while another answers in time.

The router that answered last is asked first. While none answers, each round of calls waits longer than the one before:
routers that are slow, as on a starved machine, are no outage. Holds no workers and no pairings.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tandem.core.errors import (
    IncompatibleProtocolError,
    TandemError,
    UnavailableError,
    UntrustedPeerError,
    WorkerLostError,
)
from tandem.gateway.patience import Patience
from tandem.routing.settlement import Settlement
from tandem.rpc.client import ClientPool, RouterClient
from tandem.rpc.messages import Decision, ModelInfo, PairCall, PairingAnswer, ProcessInfo, WorkerListing

_logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RouterListing:
    """A router's report on its workers; one that was not reached has no process and no workers, but a `problem`."""

    address: str
    process: ProcessInfo | None = None
    workers: tuple[WorkerListing, ...] = ()
    problem: str | None = None


class Routers:
    """Asks the routers in turn until one answers.

    Args:
        timeout_s: a router that is silent for this long counts as unavailable.
        max_timeout_s: the same while no router answers, after several rounds of calls.
    """

    def __init__(
        self, addresses: Sequence[str], pool: ClientPool[RouterClient], timeout_s: float, max_timeout_s: float = 0.0
    ) -> None:
        self.addresses = tuple(addresses)
        self._pool = pool
        self._timeout_s = timeout_s
        self._patience = Patience(timeout_s, max_timeout_s)
        self._current = 0
        self._refusing: set[str] = set()
        self._is_alone = False

    async def pair(self, call: PairCall) -> tuple[str, PairingAnswer]:
        """The workers that serve these tokens, and the address of the router that chose them.

        Raises:
            InvalidRequestError, CapacityError, UnavailableError: as `RouterHandler.pair`, or no router answers.
        """
        return await self._ask(lambda client, timeout_s: client.pair(call, timeout_s=timeout_s))

    async def models(self) -> Sequence[ModelInfo]:
        """Models that live workers serve now. Raises UnavailableError when no router answers."""
        _, found = await self._ask(lambda client, timeout_s: client.models(timeout_s=timeout_s))
        return found

    async def settle(self, address: str, settlement: Settlement) -> None:
        """Reports the outcome of a pairing to the router at `address`. Raises TandemError if it does not accept it."""
        await self._pool.get(address).settle(settlement, timeout_s=self._timeout_s)

    async def listings(self) -> Sequence[RouterListing]:
        """The workers as every router reports them."""
        return await asyncio.gather(*map(self._listing, self.addresses))

    async def decisions(self, num_latest: int) -> Sequence[tuple[str, Decision]]:
        """The latest decisions of every router that answers, each with that router's address, oldest first."""
        lists = await asyncio.gather(*(self._decisions(address, num_latest) for address in self.addresses))
        found = [item for items in lists for item in items]
        return sorted(found, key=lambda item: -item[1].age_s)[-num_latest:]

    async def _decisions(self, address: str, num_latest: int) -> Sequence[tuple[str, Decision]]:
        try:
            decisions = await self._pool.get(address).decisions(num_latest, timeout_s=self._timeout_s)
        except TandemError as error:
            _logger.warning("router %s did not say what it decided: %s", address, error)
            return []
        return [(address, decision) for decision in decisions]

    async def _listing(self, address: str) -> RouterListing:
        try:
            process = await self._pool.get(address).describe(timeout_s=self._timeout_s)
            workers = await self._pool.get(address).workers(timeout_s=self._timeout_s)
        except TandemError as error:
            return RouterListing(address, problem=str(error))
        return RouterListing(address, process, tuple(workers))

    async def _ask(self, question: Callable[[RouterClient, float], Awaitable[T]]) -> tuple[str, T]:
        """The first answer. A router that knows no worker is overruled by any other that does."""
        away: list[str] = []
        without_worker: UnavailableError | None = None
        timeout_s, longest_s, now_s = self._patience.timeout_s, 0.0, asyncio.get_running_loop().time
        for address in self._in_turn():
            asked_s = now_s()
            try:
                answer = await question(self._pool.get(address), timeout_s)
            except WorkerLostError as error:
                longest_s = max(longest_s, now_s() - asked_s)
                away.append(str(error))
            except UnavailableError as error:
                self._patience.note_answer(now_s() - asked_s)
                without_worker = without_worker or error
                self._note_refusal(address, error)
            else:
                self._patience.note_answer(now_s() - asked_s)
                self._prefer(address)
                self._refusing.discard(address)
                self._is_alone = False
                return address, answer
        if without_worker is not None:
            raise without_worker
        self._patience.note_silence(longest_s)
        self._note_outage(away)
        raise UnavailableError("no router of this cluster answers; try again in a moment", 1.0)

    def _in_turn(self) -> Sequence[str]:
        return self.addresses[self._current :] + self.addresses[: self._current]

    def _note_refusal(self, address: str, error: UnavailableError) -> None:
        """Logs once that a router and this gateway reject each other, which only an operator can mend."""
        if isinstance(error, UntrustedPeerError | IncompatibleProtocolError) and address not in self._refusing:
            self._refusing.add(address)
            _logger.error("router %s cannot be used until this is mended: %s", address, error)

    def _note_outage(self, away: Sequence[str]) -> None:
        """NOTE: logged once for consecutive failures; clients do not see the addresses."""
        if not self._is_alone:
            self._is_alone = True
            _logger.error("no router answers: %s", "; ".join(away))

    def _prefer(self, address: str) -> None:
        current = self.addresses.index(address)
        if current != self._current:
            _logger.warning("router %s answers where %s did not", address, self.addresses[self._current])
            self._current = current
