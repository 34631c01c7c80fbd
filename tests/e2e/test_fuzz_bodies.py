"""Mutated bodies on every POST route: never a 5xx, never a hang, always an error in the words of the route's API.

Seeded: the number of a body, which a failure names, makes it again.
"""

import asyncio
import copy
import gzip
import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.fake_backend import MODEL, FakeCluster, tell

NUM_AT_ONCE = 16
TIMEOUT_S = 30.0
MAX_TOKENS = 8
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "u", "prompt_cache_breakpoint": {"mode": "explicit"}}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "r"},
]
TURNS = [
    {"role": "user", "content": [{"type": "text", "text": "u", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "r"}]},
]
BODIES: Sequence[tuple[str, dict[str, Any]]] = (
    (
        "/v1/chat/completions",
        {
            "model": MODEL,
            "messages": CHAT,
            "max_tokens": MAX_TOKENS,
            "temperature": 0.5,
            "n": 1,
            "stop": ["x"],
            "logprobs": True,
            "top_logprobs": 2,
            "logit_bias": {"5": 1},
            "stream": True,
            "stream_options": {"include_usage": True},
            "tools": [{"type": "function", "function": TOOL}],
            "tool_choice": "auto",
            "chat_template_kwargs": {"enable_thinking": False},
            "cache_salt": "s",
        },
    ),
    (
        "/v1/chat/completions",
        {
            "model": MODEL,
            "messages": CHAT[:2],
            "max_tokens": MAX_TOKENS,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": TOOL["parameters"], "strict": True},
            },
            "reasoning_effort": "low",
            "seed": 1,
        },
    ),
    ("/v1/completions", {"model": MODEL, "prompt": ["a", "b"], "max_tokens": 4, "echo": True, "logprobs": 1, "n": 2}),
    ("/v1/completions", {"model": MODEL, "prompt": [[1, 2], [3]], "max_tokens": 4, "stream": True, "stop": "x"}),
    (
        "/v1/messages",
        {
            "model": MODEL,
            "messages": TURNS,
            "max_tokens": MAX_TOKENS,
            "system": [{"type": "text", "text": "s"}],
            "tools": [{"name": "f", "description": "d", "input_schema": TOOL["parameters"]}],
            "tool_choice": {"type": "auto"},
            "stop_sequences": ["x"],
            "stream": True,
            "metadata": {"user_id": "u"},
        },
    ),
    (
        "/v1/messages",
        {
            "model": MODEL,
            "messages": TURNS[:1],
            "max_tokens": 2048,
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": TOOL["parameters"]}},
            "temperature": 1.0,
        },
    ),
    ("/v1/messages/count_tokens", {"model": MODEL, "messages": TURNS[:1], "system": "s"}),
    (
        "/v1/responses",
        {
            "model": MODEL,
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "u"}]}],
            "instructions": "i",
            "max_output_tokens": 16,
            "tools": [{"type": "function", **TOOL}],
            "text": {"format": {"type": "text"}},
            "reasoning": {"effort": "low"},
            "store": False,
            "stream": True,
        },
    ),
    ("/v1/responses/input_tokens", {"model": MODEL, "input": "u", "instructions": "i"}),
    ("/tokenize", {"model": MODEL, "messages": CHAT[:2], "add_generation_prompt": True, "return_token_strs": True}),
    ("/tokenize", {"prompt": "a", "add_special_tokens": False}),
    ("/detokenize", {"model": MODEL, "tokens": [1, 2, 3]}),
)
VALUES: Sequence[Any] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    2**64,
    -(2**63) - 1,
    10**400,
    0.5,
    -0.0,
    1e308,
    math.nan,
    math.inf,
    "",
    " ",
    "\x00",
    "\ud800",
    "\U0001f600",
    "e\u0301\u200d\u202e",
    "<|im_end|>",
    "{{ 7 * 7 }}",
    "{% for i in range(10 ** 9) %}x{% endfor %}",
    "x" * 100_000,
    [],
    {},
    [[]],
    [None],
    {"": None},
    {"type": "text"},
    {"type": []},
    {"$ref": "#"},
    {"type": "object", "properties": {"a": {"$ref": "#"}}},
    {"type": "string", "pattern": "(a+)+$"},
    {"type": "string", "minLength": 10**9},
    ["x"] * 2000,
)


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values below `value`, as keys and indices."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += paths_in(item, (*path, key))
    return found


def holder(body: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        body = body[key]
    return body


def drop(source: random.Random, body: Any, path: tuple[Any, ...]) -> None:
    del holder(body, path)[path[-1]]


def replace(source: random.Random, body: Any, path: tuple[Any, ...]) -> None:
    holder(body, path)[path[-1]] = copy.deepcopy(source.choice(VALUES))


def wrap(source: random.Random, body: Any, path: tuple[Any, ...]) -> None:
    value = holder(body, path)[path[-1]]
    holder(body, path)[path[-1]] = source.choice(([value], {"a": value}, [value, value], str(value)))


def nest(source: random.Random, body: Any, path: tuple[Any, ...]) -> None:
    value: Any = "deep"
    is_list = source.random() < 0.5
    for _ in range(source.choice((20, 100, 250))):
        value = [value] if is_list else {"type": "array", "items": value}
    holder(body, path)[path[-1]] = value


def repeat(source: random.Random, body: Any, path: tuple[Any, ...]) -> None:
    place = holder(body, path)
    if isinstance(place, list):
        place += [copy.deepcopy(place[path[-1]])] * source.choice((1, 5, 300))
    else:
        place[f"{path[-1]}_{source.randrange(9)}"] = place[path[-1]]


def rename(source: random.Random, body: Any, path: tuple[Any, ...]) -> None:
    place = holder(body, path)
    if isinstance(place, dict):
        place[source.choice(("", "\ud800", "x" * 5000, "__class__", "messages", "tools", "type"))] = place[path[-1]]


def move(source: random.Random, body: Any, path: tuple[Any, ...]) -> None:
    """A value of another place."""
    other = source.choice(paths_in(body))
    holder(body, path)[path[-1]] = copy.deepcopy(holder(body, other)[other[-1]])


CHANGES: Sequence[Callable[[random.Random, Any, tuple[Any, ...]], None]] = (
    drop,
    replace,
    replace,
    replace,
    wrap,
    nest,
    repeat,
    rename,
    move,
)


def spoil(source: random.Random, raw: bytes) -> bytes:
    """Damages or replaces the bytes of a body, mostly so that they are no valid JSON."""
    at = source.randrange(len(raw))
    return source.choice(
        (
            raw[:at],
            raw[:at] + b"\xff\xfe" + raw[at:],
            raw[:at] + bytes([source.randrange(256)]) + raw[at + 1 :],
            b'{"model": "x", ' + raw[1:],
            raw + raw,
            b"[" * 100_000,
            b'{"a":' * 50_000,
            b"",
            b"null",
            b"\xef\xbb\xbf" + raw,
            raw.decode(errors="replace").encode("utf-16"),
            gzip.compress(raw),
            b'"' + b"\\ud800" * 1000 + b'"',
            raw.replace(b"}", b"}\x00", 1),
        )
    )


def mutated(source: random.Random, valid: dict[str, Any]) -> dict[str, Any]:
    body: Any = copy.deepcopy(valid)
    for _ in range(source.choice((0, 1, 1, 1, 2, 2, 3, 6))):
        if places := paths_in(body):
            source.choice(CHANGES)(source, body, source.choice(places))
        if max(map(len, paths_in(body)), default=0) > 60:  # deeper still, our own JSON writer gives up
            break
    return body if isinstance(body, dict) else {}


def request_of(number: int) -> tuple[str, bytes, dict[str, str]]:
    """Path, body and headers of the fuzzed request of this number."""
    source = random.Random(number)
    path, valid = source.choice(BODIES)
    raw = json.dumps(mutated(source, valid)).encode()
    if source.random() < 0.15:
        raw = spoil(source, raw)
    headers = {"content-type": "application/json"}
    if source.random() < 0.1:
        headers |= source.choice(
            (
                {"content-encoding": "gzip"},
                {"content-type": "text/plain"},
                {"content-type": "application/json; charset=utf-7"},
                {"content-type": "multipart/form-data; boundary=x"},
                {"accept": "text/html"},
                {"x-request-id": "\u00e9" * 400},
                {"x-request-id": ""},
                {"traceparent": "00-" + "z" * 60},
                {"anthropic-version": "1"},
                {"authorization": "Basic ::::"},
                {"x-api-key": "x" * 8000},
            )
        )
    return path, raw, headers


def fault_of(path: str, answer: httpx.Response) -> str | None:
    """Describes the fault of an answer; None = it has none."""
    if answer.status_code >= 500:
        return f"status {answer.status_code}: {answer.text[:300]}"
    if answer.status_code == 200:
        return None
    headers = answer.request.headers
    is_plain_json = headers["content-type"].startswith("application/json") and "content-encoding" not in headers
    if answer.status_code not in ((400, 404, 413, 429) if is_plain_json else (415,)):
        return f"status {answer.status_code}: {answer.text[:300]}"
    try:
        told = answer.json()
    except ValueError:
        return f"an error that is not JSON: {answer.text[:300]}"
    error = told.get("error") if isinstance(told, dict) else None
    if not isinstance(error, dict) or not error.get("message") or not isinstance(error["message"], str):
        return f"an error without a message: {answer.text[:300]}"
    if path.startswith("/v1/messages"):
        wanted = told.get("type") == "error" and isinstance(error.get("type"), str) and told.get("request_id")
    else:
        wanted = error.keys() == {"message", "type", "param", "code"}
    return None if wanted else f"an error in another API's shape: {answer.text[:300]}"


async def fuzz(client: httpx.AsyncClient, numbers: range) -> tuple[list[str], dict[int, int]]:
    """The faults that were found, and how many answers had which status."""
    faults: list[str] = []
    statuses: dict[int, int] = {}
    queue = iter(numbers)

    async def work() -> None:
        for number in queue:
            path, raw, headers = request_of(number)
            encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
            try:
                answer = await client.post(path, content=raw, headers=encoded)
            except httpx.TimeoutException:
                faults.append(f"{number}: {path}: no answer in {TIMEOUT_S:g} s")
                continue
            except httpx.HTTPError as error:
                faults.append(f"{number}: {path}: {error!r}")
                continue
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            if (fault := fault_of(path, answer)) is not None:
                faults.append(f"{number}: {path}: {fault}")

    await asyncio.gather(*(work() for _ in range(NUM_AT_ONCE)))
    return faults, statuses


def fuzzed(directory: Path, numbers: range) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        for worker in cluster.workers:
            worker.burst = 64
        async with httpx.AsyncClient(base_url=cluster.url, timeout=TIMEOUT_S) as patient:
            faults, statuses = await fuzz(patient, numbers)
        assert not faults, f"{len(faults)} of {len(numbers)}:\n" + "\n".join(sorted(faults)[:40])
        assert statuses[200] > len(numbers) / 20
        assert statuses[400] > len(numbers) / 4
        assert (await client.get("/ready")).status_code == 200

    # NOTE: routers and workers share the gateway's loop here, and 256 choices at once keep it busy for a while.
    tell(directory, story, router_timeout_s=TIMEOUT_S / 2, worker_timeout_s=TIMEOUT_S / 2, max_choices=32)


def test_a_thousand_bodies(tmp_path: Path) -> None:
    fuzzed(tmp_path, range(1000))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_thousand_bodies(tmp_path: Path) -> None:
    fuzzed(tmp_path, range(1000, 11_000))
