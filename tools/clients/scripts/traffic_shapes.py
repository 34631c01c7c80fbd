"""Requests as clients shape them that are not installed here: `vllm bench serve` and Open WebUI.

Read from their sources; sent with the standard library, so that nothing helps them on the way.
"""

import json
import time
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


def check_vllm_bench(checks: Checks, path: str, body: dict[str, Any]) -> None:
    common = {"model": checks.model, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    with checks.that(f"vllm bench serve, {path}: times and usage"):
        times, usage = [], {}
        with post(checks, path, common | body, **{"x-request-id": f"bench{path}".replace("/", "-")}) as answer:
            equal(answer.headers["x-request-id"], f"bench{path}".replace("/", "-"))
            for event in events(answer):
                if event["choices"]:
                    times.append(time.perf_counter())
                else:
                    usage = event["usage"]
        holds(len(times) > 1, "several chunks with a choice")
        equal(usage["completion_tokens"], 16)
        holds(usage["prompt_tokens"], "prompt tokens")


def check_open_webui(checks: Checks) -> None:
    with checks.that("Open WebUI: models"):
        (model,) = get(checks, "/v1/models")["data"]
        equal((model["id"], model["object"]), (checks.model, "model"))
    with checks.that("Open WebUI: a chat with its parameters, streamed"):
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
    with checks.that("Open WebUI: a title, not streamed"):
        task = {"model": checks.model, "messages": [QUESTION], "stream": False, "max_completion_tokens": 24}
        with post(checks, "/v1/chat/completions", task) as answer:
            holds(json.load(answer)["choices"][0]["message"]["content"], "text")
    with checks.that("Open WebUI: native tools, automatic"):
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
    check_vllm_bench(
        checks,
        "/v1/completions",
        {"prompt": "import os", "repetition_penalty": 1.0, "max_tokens": 16, "logprobs": None, "temperature": 0.0},
    )
    content = [{"type": "text", "text": QUESTION["content"]}]
    check_vllm_bench(
        checks,
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": content}], "max_completion_tokens": 16},
    )
    check_open_webui(checks)
    checks.finish([])


if __name__ == "__main__":
    main()
