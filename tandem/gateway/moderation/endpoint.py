"""`Moderator` (`base`) behind HTTP with OpenAI's moderation API: posts `{"input": …}`, receives `{"results": […]}`."""

import logging
from typing import Any

import httpx
import orjson

from tandem.core.errors import ConfigurationError, UnavailableError, shown, without_password
from tandem.gateway.moderation.base import ModerationVerdict

_logger = logging.getLogger(__name__)
TIMEOUT_S = 5.0  # for connecting, and for each read of the answer; then UnavailableError


class ModerationEndpoint:
    """Posts texts to `url`. Credentials in the URL are sent, but appear in no message and no log.

    NOTE: about a paragraph of an answer is collected before it is judged: a call for each token would be slow and would
    lack context.

    Raises:
        ConfigurationError: it is not an http or https URL.
    """

    window = 400
    overlap = 200

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        try:
            parts = httpx.URL(url)
        except httpx.InvalidURL:
            parts = httpx.URL()
        if parts.scheme not in ("http", "https") or not parts.host:
            raise ConfigurationError(f"moderation={shown(without_password(url))} is no http or https URL")
        auth = httpx.BasicAuth(parts.username, parts.password) if parts.userinfo else None
        self._url = parts.copy_with(userinfo=b"")
        self._client = httpx.AsyncClient(timeout=timeout_s, auth=auth)

    async def judge(self, text: str, *, num_judged: int = 0, may_go_on: bool = False) -> ModerationVerdict:
        try:
            answer = await self._client.post(self._url, json={"input": text})
            answer.raise_for_status()
            results = orjson.loads(answer.content)["results"]
            if not results:
                raise LookupError("results is empty")
            return next((_verdict(result) for result in results if result["flagged"]), ModerationVerdict())
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            _logger.error("the moderation endpoint %s gave no verdict: %r", self._url, error)
            raise UnavailableError("the moderation endpoint of this server gave no verdict; try again", 1.0) from error

    async def close(self) -> None:
        await self._client.aclose()


def _verdict(result: Any) -> ModerationVerdict:
    categories = result.get("categories") or {}
    return ModerationVerdict(next((str(name) for name, is_met in categories.items() if is_met), "flagged"))
