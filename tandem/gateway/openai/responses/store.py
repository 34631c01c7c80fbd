"""Store of responses for `previous_response_id`, retrieval and polling: the seam, and the store in this process.

Invariant: bounded; past the bound the oldest entry of the tenant that holds most goes, never the new one, so that no
tenant can fill it at the cost of those that hold little. An entry belongs to one tenant and does not exist for others;
of several that end a running response one wins. What was lost or pushed out is gone, never something else.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from tandem.core.clock import Clock, SystemClock
from tandem.core.errors import CapacityError

MAX_ENTRY_BYTES = 16 * 2**20
MAX_BYTES = 512 * 2**20
ENTRY_COST_BYTES = 1024  # what keeping an entry takes beside its text
LEASE_S = 15.0  # how long a response counts as running since its gateway last said so
_RUNNING = ("queued", "in_progress")


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response.

    Args:
        response: as clients get it.
        items: everything the model was shown before it, oldest first; earlier responses of its chain included.
        is_lost: it runs, but the gateway that ran it is gone.
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
        """What a response that goes on from here is shown. NOTE: a call that was cut off was never one."""
        output = self.response["output"]
        return self.items + [
            item for item in output if item["type"] != "function_call" or item["status"] == "completed"
        ]

    def encoded(self, max_bytes: int) -> bytes:
        """Raises CapacityError when it is longer."""
        text = orjson.dumps({"response": self.response, "items": self.items})
        if len(text) > max_bytes:
            raise CapacityError(f"response {self.response_id} has {len(text)} bytes; at most {max_bytes} are stored")
        return bytes(memoryview(text))  # NOTE: orjson's own keep the buffer they were written in, of 16 KiB or more

    @classmethod
    def decode(cls, text: bytes, *, is_lost: bool) -> "StoredResponse":
        read = orjson.loads(text)
        return cls(read["response"], read["items"], is_lost)


class ResponseStore(Protocol):
    """Responses by tenant and id. All methods but `close` raise UnavailableError when the store is away; `find` raises
    RequestError, which becomes 404, for an entry that cannot be read any more.
    """

    async def put(self, tenant: str, entry: StoredResponse, *, over_running: bool = False) -> bool:
        """Keep it, over what there was. `over_running`: only over one that runs; returns whether it did.

        One that runs counts as lost unless it is renewed within the lease.

        Raises:
            CapacityError: it is too large.
        """
        ...

    async def find(self, tenant: str, response_id: str) -> StoredResponse | None: ...

    async def renew(self, tenant: str, response_id: str) -> bool:
        """It still runs here. False when it was ended, deleted or forgotten, so that it should stop."""
        ...

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Whether there was one."""
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
    """What one tenant has, oldest first."""

    entries: OrderedDict[str, _Entry] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class EmbeddedResponseStore:
    """`ResponseStore` in this process, for one gateway. Owned by one event loop."""

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
        """Of the tenant that holds most; of the next, where that one has `but` alone."""
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
