"""Every failure of a server is in the request's outcome, and nothing is raised."""

import asyncio
import gc
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
import pytest

from tandem.core.clock import SystemClock
from tandem.core.errors import ConfigurationError, UnavailableError
from tandem.loadtest.endpoint import GatewayEndpoint, RequestResult
from tandem.loadtest.failure import CONNECT, CUT, MALFORMED, SHORT, TIMEOUT, UNFINISHED, Failure
from tandem.loadtest.load_request import LoadRequest
from tandem.loadtest.token_text import Tokens
from tests.unit.loadtest.scripted_server import (
    DONE,
    STREAM_HEAD,
    Script,
    Speaker,
    error_answer,
    event,
    json_answer,
    load_plan,
    opened,
    right_answer,
    scripted_server,
    token_event,
    usage_event,
)

ASK = LoadRequest(Tokens(b"11,12,13", 3), 4)


def told(script: Script, **options: Any) -> RequestResult:
    """Result of one request to a server with that script."""

    async def run() -> RequestResult:
        async with scripted_server(script) as server, opened(server.url, **options) as endpoint:
            return await endpoint.send(ASK, 0.0)

    return asyncio.run(run())


def failure(script: Script, **options: Any) -> Failure:
    found = told(script, **options).outcome.failure
    assert found is not None
    return found


def writes(*chunks: bytes) -> Script:
    async def script(body: dict[str, Any], speaker: Speaker) -> None:
        await speaker.whole(*chunks)

    return script


def raw(data: bytes, *, then: Callable[[Speaker], Awaitable[None]] | None = None) -> Script:
    async def script(body: dict[str, Any], speaker: Speaker) -> None:
        await speaker.raw(data)
        if then is not None:
            await then(speaker)

    return script


def test_a_right_answer_is_timed_and_counted() -> None:
    async def run() -> None:
        second = asyncio.Event()

        async def script(body: dict[str, Any], speaker: Speaker) -> None:
            await speaker.begin()
            await speaker.chunk(token_event(1))
            await second.wait()
            await speaker.chunk(token_event(2, 3) + token_event(4))
            await speaker.chunk(usage_event(4, num_cached=2) + DONE)
            await speaker.end()

        async with scripted_server(script) as server, opened(server.url) as endpoint:
            asking = asyncio.create_task(endpoint.send(ASK, -0.5))
            await server.until_asked(1)
            waited_until_s = endpoint.now_s() + 0.03
            while endpoint.now_s() < waited_until_s:
                await asyncio.sleep(0.005)
            second.set()
            answered = await asking
        outcome = answered.outcome
        assert outcome.failure is None
        assert list(outcome.event_tokens) == [1, 2, 1]
        assert outcome.event_times_s[0] < waited_until_s <= outcome.event_times_s[1]
        assert outcome.sent_s <= outcome.event_times_s[0] <= outcome.ended_s
        assert (outcome.num_prompt_tokens, outcome.num_cached_tokens, outcome.num_output_tokens) == (3, 2, 4)
        assert (answered.token_ids, outcome.request_id) == ([1, 2, 3, 4], "r1")
        assert outcome.lateness_s >= 0.5
        from_due, from_send = outcome.served().ttft_s, outcome.served(from_send=True).ttft_s
        assert from_due is not None
        assert from_send is not None
        assert from_due - from_send == pytest.approx(outcome.lateness_s)
        (asked,) = server.asked
        assert asked["prompt"] == [11, 12, 13]
        assert asked["max_tokens"] == 4
        assert asked["stream"] is asked["ignore_eos"] is asked["return_token_ids"] is True
        assert asked["model"] == "scripted"

    asyncio.run(run())


def test_a_key_is_sent_and_kept_out_of_nothing_else() -> None:
    async def run() -> None:
        async with scripted_server() as server, opened(server.url, api_key="s3cret") as endpoint:
            await endpoint.send(ASK, 0.0)
        assert all("authorization: Bearer s3cret\r\n" in head for head in server.heads)

    asyncio.run(run())


@pytest.mark.parametrize("status", [429, 503])
def test_a_refusal_is_told_apart_with_its_time(status: int) -> None:
    found = failure(raw(error_answer(status, "capacity_exceeded", retry_after="7")))
    assert found == Failure(f"http {status} capacity_exceeded", "it is capacity_exceeded", True, 7.0)


@pytest.mark.parametrize(("status", "code"), [(400, "invalid_value"), (401, "no_key"), (500, "internal_error")])
def test_other_statuses_are_failures(status: int, code: str) -> None:
    found = failure(raw(error_answer(status, code, retry_after="soon")))
    assert found == Failure(f"http {status} {code}", f"it is {code}")


def test_an_error_page_of_a_proxy() -> None:
    page = b"HTTP/1.1 502 Bad\r\ncontent-type: text/html\r\ncontent-length: 6\r\n\r\n<html>"
    assert failure(raw(page)) == Failure("http 502", "<html>")


def test_an_error_event_ends_an_answer_that_had_begun() -> None:
    error = event({"error": {"message": "lost", "code": "unavailable"}})
    answered = told(writes(token_event(1), error, DONE))
    assert answered.outcome.failure == Failure("stream unavailable", "lost")
    assert len(answered.outcome.event_times_s) == 1
    assert answered.outcome.served().finished_s is None
    assert answered.outcome.served().rejected is False


@pytest.mark.parametrize(
    "chunks",
    [
        (event(b"{not json"), DONE),
        (event([1]), DONE),
        (event({"choices": 7}), DONE),
        (event({"choices": [{"token_ids": ["x"]}]}), DONE),
        (b"<html>\n\n",),
        (token_event(1), token_event(2)),
        (*map(token_event, range(4)), DONE, token_event(5)),
        (*map(token_event, range(4)), DONE + b"data: rest"),
    ],
)
def test_a_stream_of_nonsense_is_malformed(chunks: tuple[bytes, ...]) -> None:
    assert failure(writes(*chunks)).kind == MALFORMED


def test_what_is_no_stream_is_malformed() -> None:
    assert failure(raw(json_answer({"choices": []}))).kind == MALFORMED


@pytest.mark.parametrize(
    ("chunks", "message"), [((DONE,), "no token"), ((token_event(1), usage_event(1), DONE), "1 tokens instead of 4")]
)
def test_an_answer_that_lacks_tokens_is_short(chunks: tuple[bytes, ...], message: str) -> None:
    found = failure(writes(*chunks))
    assert found.kind == SHORT
    assert message in found.message


def test_an_answer_that_may_end_early_is_not() -> None:
    assert told(writes(token_event(1), usage_event(1), DONE), ignore_eos=False).outcome.failure is None


def test_a_server_that_tells_no_token_ids_is_timed_all_the_same() -> None:
    text = event({"choices": [{"index": 0, "text": "word"}]})
    answered = told(writes(text, text, usage_event(4), DONE))
    assert answered.outcome.failure is None
    assert len(answered.outcome.event_times_s) == 2
    assert answered.outcome.num_output_tokens == 4
    assert answered.token_ids == []


def test_an_outcome_keeps_an_event_in_few_bytes() -> None:
    """Hours of load were kept as a tuple and a float for each token, until there was no memory left to report them."""
    few, many = (
        told(writes(token_event(1) * count, usage_event(count), DONE), ignore_eos=False).outcome for count in (9, 1009)
    )
    assert (len(few.event_times_s), len(many.event_times_s)) == (9, 1009)
    assert held_bytes(many) - held_bytes(few) < 1000 * 16


def held_bytes(value: object) -> int:
    """Of it and of all that it alone leads to."""
    found: dict[int, object] = {}
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if id(one) not in found and not isinstance(one, type):
            found[id(one)] = one
            waiting += gc.get_referents(one)
    return sum(map(sys.getsizeof, found.values()))


def test_a_cut_connection() -> None:
    async def cut(speaker: Speaker) -> None:
        speaker.cut()

    chunk = token_event(1)
    head = STREAM_HEAD + b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(chunk), chunk)
    assert failure(raw(head, then=cut)).kind == CUT
    assert failure(raw(b"", then=cut)).kind == CUT


def test_an_error_that_was_told_is_the_failure_whatever_follows() -> None:
    async def script(body: dict[str, Any], speaker: Speaker) -> None:
        await speaker.begin()
        await speaker.chunk(event({"error": {"message": "lost", "code": "unavailable"}}))
        await speaker.chunk(b"<html>\n\n")

    assert failure(script) == Failure("stream unavailable", "lost")


def test_a_stream_that_stops_with_its_connection_is_no_answer() -> None:
    async def leave(speaker: Speaker) -> None:
        raise ConnectionError

    head = STREAM_HEAD + b"\r\n"
    assert failure(raw(head + token_event(1), then=leave)).kind in (MALFORMED, CUT)


def test_silence() -> None:
    async def silent(body: dict[str, Any], speaker: Speaker) -> None:
        await asyncio.Event().wait()

    assert failure(silent, request_timeout_s=0.05).kind == TIMEOUT


def test_a_server_that_went_away() -> None:
    async def run() -> None:
        async with scripted_server() as server:
            endpoint = GatewayEndpoint(load_plan(server.url), SystemClock())
            await endpoint.open()
        try:
            answered = await endpoint.send(ASK, 0.0)
        finally:
            await endpoint.http.close()
        assert answered.outcome.failure is not None
        assert answered.outcome.failure.kind in (CONNECT, CUT)

    asyncio.run(run())


def test_a_cut_test_says_unfinished_and_keeps_what_came() -> None:
    async def run() -> None:
        async def script(body: dict[str, Any], speaker: Speaker) -> None:
            await speaker.begin()
            await speaker.chunk(token_event(1))
            await asyncio.Event().wait()

        async with scripted_server(script) as server, opened(server.url) as endpoint:
            asking = asyncio.create_task(endpoint.send(ASK, 0.0))
            await server.until_asked(1)
            await endpoint.http.get("/v1/models", 5.0)
            asking.cancel()
            outcome = (await asking).outcome
        assert outcome.is_unfinished
        assert outcome.failure is not None
        assert outcome.failure.kind == UNFINISHED

    asyncio.run(run())


def open_it(pages: dict[str, bytes], **options: Any) -> Any:
    async def run() -> Any:
        async with scripted_server(right_answer, pages) as server:
            endpoint = GatewayEndpoint(load_plan(server.url, **options), SystemClock())
            try:
                return await endpoint.open()
            finally:
                await endpoint.http.close()

    return asyncio.run(run())


def test_facts_are_found() -> None:
    facts = open_it({"/version": json_answer({"version": "1.2"})})
    assert (facts.model, facts.max_model_len, facts.version) == ("scripted", 4096, "1.2")
    assert open_it({"/version": b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n?"}).version is None


@pytest.mark.parametrize(
    ("pages", "options", "error", "message"),
    [
        ({"/ready": json_answer({}, 503)}, {}, UnavailableError, "GET /ready answers 503"),
        ({"/v1/models": json_answer({}, 401)}, {}, ConfigurationError, "TANDEM_LOAD_API_KEY"),
        ({"/v1/models": json_answer({"data": []})}, {}, UnavailableError, "names no model"),
        ({"/v1/models": b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n?"}, {}, UnavailableError, "no JSON"),
        ({}, {"model": "other"}, ConfigurationError, "'other' is not served there; these are: scripted"),
    ],
)
def test_a_server_that_cannot_be_tested_is_told_at_once(
    pages: dict[str, bytes], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        open_it(pages, **options)


def test_it_waits_for_a_server_that_is_not_ready_yet() -> None:
    async def run() -> None:
        async with scripted_server(pages={"/ready": json_answer({}, 503)}) as server:
            endpoint = GatewayEndpoint(load_plan(server.url, ready_timeout_s=10.0), SystemClock())
            opening = asyncio.create_task(endpoint.open())
            while not server.heads:
                await asyncio.sleep(0.001)
            server.pages["/ready"] = json_answer({})
            assert (await opening).model == "scripted"
            await endpoint.http.close()

    asyncio.run(run())


def test_bodies_are_json() -> None:
    async def run() -> None:
        async with scripted_server() as server, opened(server.url, temperature=0.5) as endpoint:
            await endpoint.send(ASK, 0.0)
        assert server.asked[0]["temperature"] == 0.5
        assert orjson.dumps(server.asked[0])

    asyncio.run(run())
