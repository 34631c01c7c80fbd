"""Requests as Open WebUI shapes them, which is not installed here: read from its source.

Sent with the standard library, so that nothing helps them on the way.
"""

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

from tools.clients.checks import Checks, equal, holds

QUESTION = {"role": "user", "content": "What does os.path.join do?"}


def post(checks: Checks, path: str, body: dict[str, Any], **headers: str) -> Any:
    """The open response."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(
        f"{checks.url}{path}", data, {"content-type": "application/json", "authorization": "Bearer none", **headers}
    )
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60)


def get(checks: Checks, path: str) -> Any:
    request = urllib.request.Request(f"{checks.url}{path}", headers={"authorization": "Bearer none"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as answer:
        return json.load(answer)


def events(answer: Any) -> Iterator[dict[str, Any]]:
    """A stream's frames; ends where the client would stop reading."""
    for line in answer:
        text = line.decode().strip()
        if not text or text.startswith(":"):
            continue
        if text == "data: [DONE]":
            return
        yield json.loads(text.removeprefix("data: "))
    raise AssertionError("the stream ended without [DONE]")


def check_open_webui(checks: Checks) -> None:
    with checks.that("models"):
        (model,) = get(checks, "/v1/models")["data"]
        equal((model["id"], model["object"]), (checks.model, "model"))
    with checks.that("a chat with its parameters, streamed"):
        body = {
            "model": checks.model,
            "messages": [{"role": "system", "content": "Be brief."}, QUESTION],
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.8,
            "top_p": 0.9,
            "max_tokens": 16,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "seed": 7,
            "stop": ["<stop>"],
            "logit_bias": {},
        }
        with post(checks, "/v1/chat/completions", body) as answer:
            found = list(events(answer))
        holds("".join(event["choices"][0]["delta"].get("content") or "" for event in found if event["choices"]), "text")
        holds(found[-1]["usage"], "usage")
    with checks.that("a title, not streamed"):
        task = {"model": checks.model, "messages": [QUESTION], "stream": False, "max_completion_tokens": 24}
        with post(checks, "/v1/chat/completions", task) as answer:
            holds(json.load(answer)["choices"][0]["message"]["content"], "text")
    with checks.that("native tools, automatic"):
        tool = {"name": "search", "description": "Search.", "parameters": {"type": "object", "properties": {}}}
        body = {
            "model": checks.model,
            "messages": [QUESTION],
            "stream": True,
            "max_tokens": 16,
            "tools": [{"type": "function", "function": tool}],
        }
        with post(checks, "/v1/chat/completions", body) as answer:
            holds(list(events(answer))[-1]["choices"][0]["finish_reason"], "a finish reason")


def main() -> None:
    checks = Checks.from_arguments()
    check_open_webui(checks)
    checks.finish([])


if __name__ == "__main__":
    main()
