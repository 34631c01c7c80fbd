"""The proxy of vLLM's 1 prefill + 1 decode: the prompt to one server, then prompt and its blocks' place to the other.

What vLLM's own example does, with as little in between as may be: bytes of the answer are passed on as they come.
"""

import argparse
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web

_PATH = "/v1/completions"
_REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Proxy:
    """Between a client and two servers, for one event loop."""

    def __init__(self, prefill_url: str, decode_url: str) -> None:
        self._prefill_url = prefill_url
        self._decode_url = decode_url
        self._session: ClientSession | None = None

    def application(self) -> web.Application:
        application = web.Application()
        application.router.add_get("/health", self._health)
        application.router.add_post(_PATH, self._complete)
        application.on_startup.append(self._open)
        application.on_cleanup.append(self._close)
        return application

    async def _open(self, _: web.Application) -> None:
        self._session = ClientSession(connector=TCPConnector(limit=0), timeout=ClientTimeout(total=None))

    async def _close(self, _: web.Application) -> None:
        await self._http.close()

    @property
    def _http(self) -> ClientSession:
        assert self._session is not None
        return self._session

    async def _health(self, _: web.Request) -> web.Response:
        """200 when both can serve."""
        try:
            for url in (self._prefill_url, self._decode_url):
                async with self._http.get(f"{url}/health") as answer:
                    answer.raise_for_status()
        except ClientError:
            return web.Response(status=503)
        return web.Response()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        async with self._http.post(self._prefill_url + _PATH, json=prefill_part(asked)) as prefilled:
            if prefilled.status != 200:
                return web.Response(status=prefilled.status, body=await prefilled.read())
            place = (await prefilled.json())["kv_transfer_params"]
        return await self._decode(request, {**asked, "kv_transfer_params": place})

    async def _decode(self, request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        async with self._http.post(self._decode_url + _PATH, json=asked) as answer:
            passed = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await passed.prepare(request)
            async for data in answer.content.iter_any():
                await passed.write(data)
            await passed.write_eof()
        return passed


def prefill_part(asked: dict[str, Any]) -> dict[str, Any]:
    """The same prompt for one token, whole, whose blocks are kept for another server."""
    kept = {name: value for name, value in asked.items() if name not in ("stream_options", "min_tokens")}
    return {**kept, "stream": False, "max_tokens": 1, "kv_transfer_params": _REMOTE_DECODE}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill-url", required=True)
    parser.add_argument("--decode-url", required=True)
    asked = parser.parse_args()
    proxy = Proxy(asked.prefill_url, asked.decode_url)
    web.run_app(proxy.application(), host="127.0.0.1", port=asked.port, access_log=None, print=None)


if __name__ == "__main__":
    main()
