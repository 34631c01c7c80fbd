"""State that requests of the Responses API share: the store, and the responses that run in the background.

One for each gateway. Owned by one event loop; `close` ends running responses, then the store.
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


class ResponseService:
    """Finds, deletes and cancels the responses of a tenant. `beat_s`: interval at which running ones are renewed."""

    def __init__(self, store: ResponseStore, beat_s: float = BEAT_S) -> None:
        self.store = store
        self.background = BackgroundResponses(store, beat_s)

    @classmethod
    def open(cls, redis_url: str | None, keys: Sequence[bytes], max_bytes: int | None = None) -> "ResponseService":
        """Opens the store; without Redis, responses are kept in this process.

        Args:
            redis_url: of the Redis that gateways share.
            keys: encrypt the responses there; see `ResponseSealer`.
            max_bytes: of all responses; None: the store's default.

        Raises:
            ConfigurationError: the URL is invalid, or a key is too short.
        """
        if redis_url is None:
            return cls(EmbeddedResponseStore(max_bytes=max_bytes or store.MAX_BYTES))
        return cls(RedisResponseStore(redis_url, ResponseSealer(keys), max_bytes=max_bytes or redis_store.MAX_BYTES))

    async def close(self, timeout_s: float = 0.0) -> None:
        """Ends everything. `timeout_s`: how long background responses may go on."""
        await self.background.close(timeout_s)

    async def find(self, tenant: str, response_id: str) -> StoredResponse:
        """The stored response. Raises RequestError with status 404 when there is none; UnavailableError."""
        entry = await self.store.find(tenant, response_id) if is_response_id(response_id) else None
        if entry is None:
            raise _missing(response_id)
        return entry

    async def delete(self, tenant: str, response_id: str) -> None:
        """Deletes a response, and stops it if it runs. Raises as `find`."""
        if not is_response_id(response_id) or not await self.store.delete(tenant, response_id):
            raise _missing(response_id)
        self.background.call_off(response_id)

    async def cancel(self, tenant: str, response_id: str) -> Mapping[str, Any]:
        """Cancels a response; returns its state: cancelled, or the one in which it had ended before. Raises as
        `find`.
        """
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
    """The response as clients receive it; one whose gateway is gone has failed."""
    return {**entry.response, "status": "failed", "error": _LOST} if entry.is_lost else entry.response


def _missing(response_id: str) -> RequestError:
    return RequestError(
        f"response {shown(response_id)} was not found", param="response_id", code="not_found", status=404
    )
