"""Where responses are kept for `previous_response_id`, retrieval and polling: the seam, and the store in this process.

Invariant: bounded; an entry belongs to one tenant and does not exist for others; of several that end a running response
one wins. What was lost or pushed out is gone, never something else.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from tandem.core.clock import Clock, SystemClock
from tandem.core.errors import CapacityError

MAX_ENTRY_BYTES = 16 * 2**20
MAX_ENTRIES = 10_000
MAX_BYTES = 512 * 2**20
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
        return text

    @classmethod
    def decode(cls, text: bytes, *, is_lost: bool) -> "StoredResponse":
        read = orjson.loads(text)
        return cls(read["response"], read["items"], is_lost)


class ResponseStore(Protocol):
    """Responses by tenant and id. All methods but `close` raise UnavailableError when the store is away."""

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


class EmbeddedResponseStore:
    """`ResponseStore` in this process, for one gateway. The oldest go first. Owned by one event loop."""

    def __init__(
        self,
        *,
        max_entries: int = MAX_ENTRIES,
        max_bytes: int = MAX_BYTES,
        max_entry_bytes: int = MAX_ENTRY_BYTES,
        lease_s: float = LEASE_S,
        clock: Clock | None = None,
    ) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._max_entry_bytes = min(max_entry_bytes, max_bytes)
        self._lease_s = lease_s
        self._clock = clock or SystemClock()
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        self.num_bytes = 0

    async def put(self, tenant: str, entry: StoredResponse, *, over_running: bool = False) -> bool:
        key, text = (tenant, entry.response_id), entry.encoded(self._max_entry_bytes)
        before = self._entries.get(key)
        if over_running and (before is None or before.lease_ends_s is None):
            return False
        self._forget(key)
        lease_ends_s = self._clock.now_s() + self._lease_s if entry.is_running else None
        self._entries[key] = _Entry(text, lease_ends_s)
        self.num_bytes += len(text)
        while len(self._entries) > self._max_entries or self.num_bytes > self._max_bytes:
            self._forget(next(iter(self._entries)))
        return True

    async def find(self, tenant: str, response_id: str) -> StoredResponse | None:
        found = self._entries.get((tenant, response_id))
        if found is None:
            return None
        is_lost = found.lease_ends_s is not None and found.lease_ends_s <= self._clock.now_s()
        return StoredResponse.decode(found.text, is_lost=is_lost)

    async def renew(self, tenant: str, response_id: str) -> bool:
        found = self._entries.get((tenant, response_id))
        if found is None or found.lease_ends_s is None:
            return False
        found.lease_ends_s = self._clock.now_s() + self._lease_s
        return True

    async def delete(self, tenant: str, response_id: str) -> bool:
        return self._forget((tenant, response_id))

    async def close(self) -> None: ...

    def _forget(self, key: tuple[str, str]) -> bool:
        found = self._entries.pop(key, None)
        self.num_bytes -= 0 if found is None else len(found.text)
        return found is not None
