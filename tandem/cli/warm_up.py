"""Sends short requests through a new cluster before `tandem up` calls it ready, so that the first user need not wait.

They cause the work that happens once: reading pages of weights, compiling templates, connecting workers.
"""

import asyncio

import httpx

_TIMEOUT_S = 120.0
_PROMPT = "Hello"


async def warm_up(url: str, model: str, *, has_chat: bool, num_requests: int) -> None:
    """Sends `num_requests` at once, for a few tokens each; the answers, even refusals, are ignored."""
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, trust_env=False) as client:
        asked = (_ask(client, model, has_chat, index) for index in range(num_requests))
        await asyncio.gather(*asked)


async def _ask(client: httpx.AsyncClient, model: str, has_chat: bool, index: int) -> None:
    text = f"{_PROMPT} {index}"
    asked: dict[str, object] = {"messages": [{"role": "user", "content": text}]} if has_chat else {"prompt": text}
    try:
        await client.post(
            f"/v1/{'chat/completions' if has_chat else 'completions'}",
            json={"model": model, "max_tokens": 4, "temperature": 0, **asked},
        )
    except httpx.HTTPError:
        return
