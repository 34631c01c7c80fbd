"""Finds workers through the lists of routers, so that the planner can watch workers wherever they run.

Implements `process.discovery.Discovery`; the watch on each worker determines whether it is alive.
"""

import asyncio
from collections.abc import Sequence

from tandem.core.errors import LocalityUnavailableError, TandemError
from tandem.rpc.client import RouterClient
from tandem.rpc.credentials import Credentials
from tandem.rpc.messages import WorkerListing, WorkerRecord

_TIMEOUT_S = 2.0
_FRESH_S = 5.0


class ListedWorkers:
    """Asks every router for its workers; one that answers is enough.

    Args:
        model: served model name of the workers to return; None = all.
    """

    def __init__(
        self,
        routers: Sequence[str],
        credentials: Credentials,
        model: str | None = None,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        self._clients = [RouterClient(address, credentials) for address in dict.fromkeys(routers)]
        self._model = model
        self._timeout_s = timeout_s
        self.problem: str | None = None

    async def workers(self) -> Sequence[WorkerRecord]:
        """Returns the workers that a router has heard from recently.

        Raises:
            LocalityUnavailableError: no router answers; `problem` then holds the message.
        """
        answers = await asyncio.gather(*map(self._ask, self._clients))
        listings = [answer for answer in answers if not isinstance(answer, TandemError)]
        if not listings:
            self.problem = f"no router answers: {answers[0]}"
            raise LocalityUnavailableError(self.problem)
        self.problem = None
        latest: dict[str, WorkerListing] = {}
        for listing in (one for listed in listings for one in listed if self._counts(one)):
            worker_id = listing.status.worker.worker_id
            if worker_id not in latest or listing.age_s < latest[worker_id].age_s:
                latest[worker_id] = listing
        return [_record(listing) for listing in latest.values()]

    async def announce(self, record: WorkerRecord) -> None:
        """Nothing to do: workers announce themselves."""

    async def withdraw(self, record: WorkerRecord) -> None:
        """Nothing to do: workers leave by themselves."""

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self._clients))

    async def _ask(self, client: RouterClient) -> Sequence[WorkerListing] | TandemError:
        try:
            return await client.workers(timeout_s=self._timeout_s)
        except TandemError as error:
            return error

    def _counts(self, listing: WorkerListing) -> bool:
        status = listing.status
        is_ours = self._model is None or status.model.name == self._model
        return is_ours and listing.age_s <= _FRESH_S and bool(status.worker.address)


def _record(listing: WorkerListing) -> WorkerRecord:
    status = listing.status
    return WorkerRecord(status.worker, role=status.state.role, model=status.model.name, pool=status.state.fingerprint)
