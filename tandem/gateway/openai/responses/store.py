"""Store of responses for `previous_response_id`, retrieval and polling: the interface, and an in-process store.

Invariant: bounded. Beyond the bound the oldest entry of the largest tenant is evicted, never the new one, so that no
tenant can evict the entries of small ones. An entry is visible to its own tenant only; of several writers that end a
running response one wins. Evicted and lost entries are reported as missing, never replaced by others.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from tandem.core.clock import Clock, SystemClock
from tandem.core.errors import CapacityError
from tandem.gateway.openai.responses.items import empty_message

MAX_ENTRY_BYTES = 16 * 2**20  # JSON of one response
MAX_BYTES = 512 * 2**20  # all entries of the in-process store, overhead included
ENTRY_COST_BYTES = 1024  # memory of an entry beside its text
LEASE_S = 15.0  # a response counts as running for this long after its gateway last renewed it
_RUNNING = ("queued", "in_progress")


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as it is stored, with the conversation that led to it.

    Args:
        response: as clients receive it.
        items: all items the model was shown before its output, oldest first; earlier responses of the chain included.
        is_lost: it is marked running, but the gateway that ran it is gone.
    """

    response: Mapping[str, Any]
    items: list[dict[str, Any]]
    is_lost: bool = False

    @property
    def response_id(self) -> str:
        return str(self.response["id"])

    @property
    def is_running(self) -> bool:
        return self.response["status"] in _RUNNING

    @property
    def context(self) -> list[dict[str, Any]]:
        """Items shown to the model by a response that continues this one. NOTE: a call that was cut off is left out; an
        empty message takes the place of all output, since templates may require an answer to each question.
        """
        output = self.response["output"]
        shown = [item for item in output if item["type"] != "function_call" or item["status"] == "completed"]
        return self.items + (shown or [empty_message(self.response_id, len(output))])

    def encoded(self, max_bytes: int) -> bytes:
        """The response as JSON. Raises CapacityError when it is longer than `max_bytes`."""
        text = orjson.dumps({"response": self.response, "items": self.items})
        if len(text) > max_bytes:
            raise CapacityError(f"response {self.response_id} has {len(text)} bytes; at most {max_bytes} are stored")
        return bytes(memoryview(text))  # NOTE: orjson's own keep the buffer they were written in, of 16 KiB or more

    @classmethod
    def decode(cls, text: bytes, *, is_lost: bool) -> "StoredResponse":
        """Inverse of `encoded`."""
        read = orjson.loads(text)
        return cls(read["response"], read["items"], is_lost)


class ResponseStore(Protocol):
    """Responses by tenant and id. All methods except `close` raise UnavailableError when the store cannot be reached;
    `find` raises RequestError with status 404 for an entry that can no longer be read.
    """

    async def put(self, tenant: str, entry: StoredResponse, *, over_running: bool = False) -> bool:
        """Stores an entry, replacing an earlier one. `over_running`: only if that one is running; returns whether it
        was stored.

        A running response counts as lost unless it is renewed within the lease (`LEASE_S`).

        Raises:
            CapacityError: it is too large.
        """
        ...

    async def find(self, tenant: str, response_id: str) -> StoredResponse | None:
        """The entry, or None."""
        ...

    async def renew(self, tenant: str, response_id: str) -> bool:
        """Extends the lease of a running response. False: it was ended, deleted or evicted, so it should stop."""
        ...

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Deletes an entry; returns whether there was one."""
        ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class _Entry:
    text: bytes
    lease_ends_s: float | None

    @property
    def num_bytes(self) -> int:
        return len(self.text) + ENTRY_COST_BYTES


@dataclass(slots=True)
class _Shelf:
    """Entries of one tenant, oldest first."""

    entries: OrderedDict[str, _Entry] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class EmbeddedResponseStore:
    """A `ResponseStore` in memory, for one gateway. Owned by one event loop."""

    def __init__(
        self,
        *,
        max_bytes: int = MAX_BYTES,
        max_entry_bytes: int = MAX_ENTRY_BYTES,
        lease_s: float = LEASE_S,
        clock: Clock | None = None,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_entry_bytes = min(max_entry_bytes, max_bytes - ENTRY_COST_BYTES)
        self._lease_s = lease_s
        self._clock = clock or SystemClock()
        self._shelves: dict[str, _Shelf] = {}
        self.num_bytes = 0

    async def put(self, tenant: str, entry: StoredResponse, *, over_running: bool = False) -> bool:
        text = entry.encoded(self._max_entry_bytes)
        before = self._find(tenant, entry.response_id)
        if over_running and (before is None or before.lease_ends_s is None):
            return False
        self._forget(tenant, entry.response_id)
        lease_ends_s = self._clock.now_s() + self._lease_s if entry.is_running else None
        kept = _Entry(text, lease_ends_s)
        shelf = self._shelves.setdefault(tenant, _Shelf())
        shelf.entries[entry.response_id] = kept
        shelf.num_bytes += kept.num_bytes
        self.num_bytes += kept.num_bytes
        while self.num_bytes > self._max_bytes:
            self._forget_oldest(kept)
        return True

    async def find(self, tenant: str, response_id: str) -> StoredResponse | None:
        found = self._find(tenant, response_id)
        if found is None:
            return None
        is_lost = found.lease_ends_s is not None and found.lease_ends_s <= self._clock.now_s()
        return StoredResponse.decode(found.text, is_lost=is_lost)

    async def renew(self, tenant: str, response_id: str) -> bool:
        found = self._find(tenant, response_id)
        if found is None or found.lease_ends_s is None:
            return False
        found.lease_ends_s = self._clock.now_s() + self._lease_s
        return True

    async def delete(self, tenant: str, response_id: str) -> bool:
        return self._forget(tenant, response_id)

    async def close(self) -> None: ...

    def _find(self, tenant: str, response_id: str) -> _Entry | None:
        shelf = self._shelves.get(tenant)
        return None if shelf is None else shelf.entries.get(response_id)

    def _forget_oldest(self, but: _Entry) -> None:
        """Evicts the oldest entry of the largest tenant that has an entry older than `but`, the new one."""
        shelves = (item for item in self._shelves.items() if next(iter(item[1].entries.values())) is not but)
        tenant, shelf = max(shelves, key=lambda item: item[1].num_bytes)
        self._forget(tenant, next(iter(shelf.entries)))

    def _forget(self, tenant: str, response_id: str) -> bool:
        found = self._find(tenant, response_id)
        if found is None:
            return False
        shelf = self._shelves[tenant]
        del shelf.entries[response_id]
        shelf.num_bytes -= found.num_bytes
        self.num_bytes -= found.num_bytes
        if not shelf.entries:
            del self._shelves[tenant]
        return True
