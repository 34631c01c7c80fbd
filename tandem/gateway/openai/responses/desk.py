"""State that the requests of this API share: the store, and the responses that run without a client.

A gateway has one. Owned by one event loop; `close` ends what runs, then the store.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tandem.core.errors import shown
from tandem.gateway.errors import RequestError
from tandem.gateway.openai.responses import redis_store, store
from tandem.gateway.openai.responses.background import BEAT_S, BackgroundResponses
from tandem.gateway.openai.responses.ids import is_response_id
from tandem.gateway.openai.responses.redis_store import RedisResponseStore
from tandem.gateway.openai.responses.sealing import ResponseSealer
from tandem.gateway.openai.responses.store import EmbeddedResponseStore, ResponseStore, StoredResponse

_LOST = {"code": "server_error", "message": "the gateway that ran this response is gone; send the request again"}


class ResponseDesk:
    """Finds, deletes and cancels responses of a tenant's. `beat_s`: how often running ones are renewed."""

    def __init__(self, store: ResponseStore, beat_s: float = BEAT_S) -> None:
        self.store = store
        self.background = BackgroundResponses(store, beat_s)

    @classmethod
    def open(cls, redis_url: str | None, keys: Sequence[bytes], max_bytes: int | None = None) -> "ResponseDesk":
        """Without Redis, responses are kept in this process.

        Args:
            redis_url: where gateways share them.
            keys: encrypt them there; see `ResponseSealer`.
            max_bytes: of all of them; None leaves it to the store.

        Raises:
            ConfigurationError: the URL is none, or a key is too short.
        """
        if redis_url is None:
            return cls(EmbeddedResponseStore(max_bytes=max_bytes or store.MAX_BYTES))
        return cls(RedisResponseStore(redis_url, ResponseSealer(keys), max_bytes=max_bytes or redis_store.MAX_BYTES))

    async def close(self, timeout_s: float = 0.0) -> None:
        """`timeout_s`: how long background responses may go on."""
        await self.background.close(timeout_s)

    async def find(self, tenant: str, response_id: str) -> StoredResponse:
        """Raises RequestError, which becomes 404, when there is none; UnavailableError."""
        entry = await self.store.find(tenant, response_id) if is_response_id(response_id) else None
        if entry is None:
            raise _missing(response_id)
        return entry

    async def delete(self, tenant: str, response_id: str) -> None:
        """Raises as `find`. One that runs is stopped."""
        if not is_response_id(response_id) or not await self.store.delete(tenant, response_id):
            raise _missing(response_id)
        self.background.call_off(response_id)

    async def cancel(self, tenant: str, response_id: str) -> Mapping[str, Any]:
        """What it is now: cancelled, or what it had become before. Raises as `find`."""
        entry = await self.find(tenant, response_id)
        if not entry.response["background"]:
            raise RequestError(
                f"response {response_id} does not run in the background; leave its connection to cancel it"
            )
        if entry.is_running:
            cancelled = StoredResponse({**entry.response, "status": "cancelled"}, entry.items)
            if await self.store.put(tenant, cancelled, over_running=True):
                self.background.call_off(response_id)
                return cancelled.response
        return as_shown(await self.find(tenant, response_id))


def as_shown(entry: StoredResponse) -> Mapping[str, Any]:
    """The response as clients get it."""
    return {**entry.response, "status": "failed", "error": _LOST} if entry.is_lost else entry.response


def _missing(response_id: str) -> RequestError:
    return RequestError(
        f"response {shown(response_id)} was not found", param="response_id", code="not_found", status=404
    )
