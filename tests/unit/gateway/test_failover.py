"""A choice goes on, token by token the same, whichever worker or router is lost; else its client is told."""

import asyncio
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tandem.core.errors import (
    CapacityError,
    EngineStoppedError,
    IncompatibleProtocolError,
    InvalidRequestError,
    TandemError,
    UnavailableError,
)
from tandem.core.types import FinishReason
from tandem.gateway.gateway import Gateway
from tandem.rpc.channel import KEEPALIVE_S
from tandem.rpc.credentials import ProcessRole
from tandem.text.tokenizer import Tokenizer
from tests.helpers.fake_backend import MODEL, FakeCluster, FakeWorker, eventually, tell, text_of
from tests.helpers.secret import AS_ROUTER, serving_as

SEED, NUM_TOKENS = 5, 10
RIGHT = text_of(SEED, NUM_TOKENS)


def body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "abc", "seed": SEED, "max_tokens": NUM_TOKENS, "stream": True, **more}


async def stream(client: httpx.AsyncClient, **more: Any) -> tuple[str, dict[str, Any] | None]:
    """The text of a streamed answer and the error it ended with; it must end with [DONE]."""
    response = await client.post("/v1/completions", json=body(**more))
    assert response.status_code == 200, response.text
    frames = response.text.removesuffix("\n\n").split("\n\n")
    assert frames.pop() == "data: [DONE]"
    values = [orjson.loads(frame.removeprefix("data: ")) for frame in frames]
    text = "".join(choice["text"] for value in values for choice in value.get("choices", ()))
    return text, next((value["error"] for value in values if "error" in value), None)


def test_a_worker_that_leaves_mid_stream_is_replaced_and_no_token_is_lost_or_repeated(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        first, second = cluster.workers
        for failure in (UnavailableError("draining"), EngineStoppedError("stopped"), CapacityError("full")):
            for position in (0, 4, NUM_TOKENS - 1):
                first.fail_at, first.failure = position, failure
                assert await stream(client) == (RIGHT, None)
                assert first.calls[-1].output_token_ids == ()
                assert len(second.calls[-1].output_token_ids) == position
                assert cluster.routers[0].calls[-1].excluded == ("decode-0",)
                assert cluster.routers[0].calls[-1].fingerprint == ("f" * 32 if position else None)
                places = [call.place for call in cluster.routers[0].calls[-2:]]
                assert [place is not None and place.is_retry for place in places] == [False, True]
                assert tuple(cluster.routers[0].calls[-1].token_ids[3:]) == second.calls[-1].output_token_ids

    tell(tmp_path, story)


def test_a_killed_worker_is_replaced_before_and_after_the_first_token(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        first = cluster.workers[0]
        first.hold_at = 4
        answer = asyncio.create_task(stream(client))
        await first.reached.wait()
        await first.kill()
        assert await answer == (RIGHT, None)
        assert await stream(client) == (RIGHT, None)
        metrics = (await client.get("/metrics")).text
        assert "tandem_gateway_failovers_total 2.0" in metrics

    tell(tmp_path, story)


def test_logprobs_of_the_prompt_are_told_once_however_many_workers_it_takes(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        first, second = cluster.workers
        for options in ({"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}):
            asked = body(stream=False, **options)
            whole = (await client.post("/v1/completions", json=asked)).json()["choices"]
            for position in (0, 2):
                first.fail_at = position
                response = await client.post("/v1/completions", json=asked)
                assert response.status_code == 200, response.text
                assert response.json()["choices"] == whole
                assert len(second.calls[-1].output_token_ids) == position
            first.fail_at = None
        assert await stream(client, echo=True, logprobs=1) == ("abc" + RIGHT, None)

    tell(tmp_path, story)


def test_a_worker_that_stops_without_a_word_is_noticed_before_grpc_does(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        first = cluster.workers[0]
        first.hold_at = 4
        answer = asyncio.create_task(stream(client))
        await first.reached.wait()
        stalled_s = time.monotonic()
        first.is_stalled = True
        assert await answer == (RIGHT, None)
        assert time.monotonic() - stalled_s < KEEPALIVE_S
        await eventually(lambda: first.num_open == 0)

    tell(tmp_path, story)


def test_a_slow_worker_that_lives_is_left_alone(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        first, second = cluster.workers
        first.hold_at = 0
        answer = asyncio.create_task(stream(client))
        await eventually(lambda: first.num_status >= 4)
        first.go.set()
        assert await answer == (RIGHT, None)
        assert not second.calls

    tell(tmp_path, story, silent_after_s=0.05)


def test_a_worker_started_again_in_place_is_lost_for_its_old_streams_and_good_for_new_ones(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        (only,) = cluster.workers
        only.hold_at = 4
        answer = asyncio.create_task(stream(client))
        await only.reached.wait()
        only.hold_at = None
        await only.start_again("second")
        assert await answer == (RIGHT, None)
        assert [call.decode and call.decode.incarnation for call in only.calls] == ["first", "second"]

    tell(tmp_path, story, num_workers=1, silent_after_s=0.05)


def test_the_only_worker_goes_on_with_its_streams_once_it_answers_again(tmp_path: Path) -> None:
    """It stood still for longer than silence is borne: the incarnation that was given up on was refused for ever."""

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        (only,) = cluster.workers
        only.hold_at = 4
        answers = [asyncio.create_task(stream(client)) for _ in range(3)]
        await eventually(lambda: only.num_open == 3)
        await only.reached.wait()
        only.is_stalled = True
        await eventually(lambda: only.num_open == 0)  # NOTE: the streams that were given up have ended there
        asked = len(cluster.routers[0].calls)
        await eventually(lambda: len(cluster.routers[0].calls) > asked + 4)
        assert len(only.calls) == 3, "it was asked to go on before it had answered"
        only.hold_at, only.is_stalled = None, False
        assert await asyncio.gather(*answers) == [(RIGHT, None)] * 3
        assert len(only.calls) == 6
        assert {call.decode and call.decode.incarnation for call in only.calls} == {"first"}
        assert not len(cluster.gateway.gateway.queues)

    tell(tmp_path, story, num_workers=1, silent_after_s=0.05, worker_timeout_s=0.2, failover_timeout_s=20.0)


def test_the_only_worker_goes_on_with_its_streams_although_it_is_slow_to_answer(tmp_path: Path) -> None:
    """Regression: each probe of a starved worker took longer than its timeout, so its streams failed in the end, or
    were lost again and again until the attempts were used up.
    """

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        (only,) = cluster.workers
        only.hold_at, only.status_s = 4, 0.5
        answer = asyncio.create_task(stream(client))
        await eventually(lambda: len(only.calls) == 2)
        num_probes = only.num_status
        await eventually(lambda: only.num_status > num_probes + 1)  # NOTE: of the stream, which is silent again
        assert only.num_open == 1, "it was lost again"
        only.go.set()
        assert await answer == (RIGHT, None)
        assert len(only.calls) == 2

    tell(tmp_path, story, num_workers=1, silent_after_s=0.05, worker_timeout_s=0.1, failover_timeout_s=6.0)


def test_a_worker_that_said_no_is_not_asked_again_as_the_same_incarnation(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        (only,) = cluster.workers
        only.fail_at, only.lifecycle = 4, "draining"
        answer = asyncio.create_task(stream(client))
        await eventually(lambda: len(cluster.routers[0].calls) > 4)
        assert len(only.calls) == 1
        only.fail_at, only.lifecycle = None, "ready"
        await only.start_again("second")
        assert await answer == (RIGHT, None)
        assert [call.decode and call.decode.incarnation for call in only.calls] == ["first", "second"]

    tell(tmp_path, story, num_workers=1, failover_timeout_s=20.0)


def test_a_worker_that_took_no_work_for_a_while_is_asked_again(tmp_path: Path) -> None:
    """Regression: a request that came to the only worker while its ranks were formed anew was refused in the end."""

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        (only,) = cluster.workers
        only.refuse, only.lifecycle = UnavailableError("recovering"), "recovering"
        answer = asyncio.create_task(stream(client))
        await eventually(lambda: len(cluster.routers[0].calls) > 4)
        assert len(only.calls) == 1, "it was asked to serve while it said that it does not"
        only.refuse, only.lifecycle = None, "ready"
        assert await answer == (RIGHT, None)
        assert len(only.calls) == 2

    tell(tmp_path, story, num_workers=1, failover_timeout_s=20.0)


def test_one_that_is_back_goes_on_where_the_others_are_full(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        first, second = cluster.workers
        first.hold_at = 4
        answer = asyncio.create_task(stream(client))
        await first.reached.wait()
        first.is_stalled, second.refuse = True, CapacityError("full", 1.2)
        await eventually(lambda: len(second.calls) == 1)
        first.hold_at, first.is_stalled = None, False
        assert await answer == (RIGHT, None)
        assert [len(call.output_token_ids) for call in first.calls] == [0, 4]

    tell(tmp_path, story, silent_after_s=0.05, worker_timeout_s=0.2, failover_timeout_s=20.0)


def test_new_requests_wait_for_a_worker_and_only_the_first_asks(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        (router,), gateway = cluster.routers, cluster.gateway.gateway
        await gateway.model_info.get()
        router.workers.clear()
        answers = [asyncio.create_task(stream(client)) for _ in range(4)]
        await eventually(lambda: waiting(gateway) == 4)
        num_asked = len(router.calls)
        await eventually(lambda: len(router.calls) >= num_asked + 3)
        assert len({call.request_id for call in router.calls[num_asked:]}) == 1
        router.workers += cluster.workers
        assert await asyncio.gather(*answers) == [(RIGHT, None)] * 4
        assert waiting(gateway) == 0

    tell(tmp_path, story, num_workers=1, failover_timeout_s=20.0)


def test_a_request_that_waited_in_vain_is_told_when_to_come_back(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        await cluster.gateway.gateway.model_info.get()
        cluster.routers[0].workers.clear()
        response = await client.post("/v1/completions", json=body())
        assert (response.status_code, response.headers["retry-after"]) == (503, "2")
        assert "no live decode worker is left; the request has waited 0.2 s" in response.json()["error"]["message"]

    tell(tmp_path, story, num_workers=1, failover_timeout_s=0.2)


@pytest.mark.parametrize("num_tokens", [0, 4])
def test_a_client_that_leaves_while_its_request_waits_for_a_worker_leaves_nothing(
    tmp_path: Path, num_tokens: int
) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        (only,), gateway = cluster.workers, cluster.gateway.gateway
        await gateway.model_info.get()
        if num_tokens:
            only.fail_at, only.lifecycle = num_tokens, "draining"
        else:
            cluster.routers[0].workers.clear()
        answer = asyncio.create_task(stream(client))
        await eventually(lambda: waiting(gateway) == 1)
        assert gateway.admission.num_open == 1
        answer.cancel()
        await eventually(lambda: gateway.admission.num_open == 0)
        assert waiting(gateway) == 0
        assert not len(gateway.queues)
        num_asked = len(cluster.routers[0].calls)
        only.fail_at, only.lifecycle, cluster.routers[0].workers[:] = None, "ready", cluster.workers
        assert await stream(client) == (RIGHT, None)
        assert len(cluster.routers[0].calls) == num_asked + 1

    tell(tmp_path, story, num_workers=1, failover_timeout_s=60.0)


def waiting(gateway: Gateway) -> float:
    """Choices that wait."""
    (sample,) = [sample for family in gateway.metrics.waiting.collect() for sample in family.samples]
    return sample.value


def test_a_stream_that_ends_early_or_is_aborted_by_its_worker_goes_on_elsewhere(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        first = cluster.workers[0]
        first.end_early_at = 3
        assert await stream(client) == (RIGHT, None)
        first.end_early_at, first.last_reason = None, FinishReason.ABORT
        assert await stream(client) == (RIGHT, None)
        assert [len(call.output_token_ids) for call in cluster.workers[1].calls] == [3, NUM_TOKENS - 1]

    tell(tmp_path, story)


def test_every_choice_moves_on_its_own(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        cluster.workers[0].fail_at = 2
        response = await client.post("/v1/completions", json=body(stream=False, n=3, prompt=["ab", "cd"]))
        texts = [choice["text"] for choice in response.json()["choices"]]
        cluster.workers[0].fail_at = None
        again = await client.post("/v1/completions", json=body(stream=False, n=3, prompt=["ab", "cd"]))
        assert texts == [choice["text"] for choice in again.json()["choices"]]
        assert texts[0] == texts[3] == RIGHT
        assert len(set(texts)) == 3

    tell(tmp_path, story)


def test_when_nobody_is_left_a_late_failure_is_an_error_event_and_an_early_one_a_status(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        (only,) = cluster.workers
        only.fail_at, only.lifecycle = 4, "draining"
        text, error = await stream(client)
        assert text == RIGHT[:4]
        assert error is not None
        assert error["code"] == "unavailable"
        only.fail_at = 0
        response = await client.post("/v1/completions", json=body())
        assert response.status_code == 503
        assert response.headers["retry-after"] == "2"
        assert response.json()["error"]["type"] == "service_unavailable_error"

    tell(tmp_path, story, num_workers=1, failover_timeout_s=0.1)


def test_attempts_are_bounded(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        for worker in cluster.workers:
            worker.fail_at = 0
        response = await client.post("/v1/completions", json=body())
        assert response.status_code == 503
        assert [len(worker.calls) for worker in cluster.workers] == [1, 1, 0]

    tell(tmp_path, story, num_workers=3, max_attempts=2)


def test_a_full_worker_is_passed_over_and_when_all_are_full_the_answer_is_429(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        first, second = cluster.workers
        first.refuse = CapacityError("full", 1.2)
        assert await stream(client) == (RIGHT, None)
        second.refuse = CapacityError("full", 6.2)
        started_s = time.monotonic()
        response = await client.post("/v1/completions", json=body())
        assert (response.status_code, response.headers["retry-after"]) == (429, "7")
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert time.monotonic() - started_s < 10.0, "it waited for a worker although all are there"

    tell(tmp_path, story, failover_timeout_s=60.0)


def test_refusals_of_the_router_become_statuses(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        cases: list[tuple[TandemError, int, str | None]] = [
            (CapacityError("queue is full", 3.4), 429, "4"),
            (UnavailableError("nobody", 8.0), 503, "8"),
            (InvalidRequestError("the prompt is too long"), 400, None),
            (CapacityError("for ever", 1e9), 429, "120"),
        ]
        for error, status, retry_after in cases:
            cluster.routers[0].refuse = error
            response = await client.post("/v1/completions", json=body())
            assert response.status_code == status
            assert response.headers.get("retry-after") == retry_after
            assert response.json()["error"]["message"] == str(error)

    tell(tmp_path, story, failover_timeout_s=0.0)


def test_what_a_worker_cannot_go_on_with_is_an_error_and_is_not_tried_elsewhere(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        first, second = cluster.workers
        first.last_reason = FinishReason.ERROR
        text, error = await stream(client)
        assert text == RIGHT[:-1]
        assert error is not None
        assert "broken" in error["message"]
        assert not second.calls

    tell(tmp_path, story)


def test_the_next_router_serves_when_one_is_dead_or_silent_and_is_remembered(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        first, second, third = cluster.routers
        first.is_stalled = True
        assert await stream(client) == (RIGHT, None)
        num_asked = len(first.calls)
        assert await stream(client) == (RIGHT, None)
        assert len(first.calls) == num_asked
        assert second.server is not None
        await second.server.stop(0)
        assert await stream(client) == (RIGHT, None)
        assert third.calls

    tell(tmp_path, story, num_routers=3, router_timeout_s=1.0)


def test_slow_routers_are_waited_for(tmp_path: Path) -> None:
    """Regression: each call of a router on a starved machine took longer than its timeout, so requests were refused
    with "no router answers" although it lived.
    """

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        (router,) = cluster.routers
        router.answer_s = 0.4
        assert await stream(client) == (RIGHT, None)
        num_asked = len(router.calls)
        assert await stream(client) == (RIGHT, None)
        assert len(router.calls) == num_asked + 1, "the time of the last answer was forgotten"
        router.answer_s = 0.0
        assert await stream(client) == (RIGHT, None)

    tell(tmp_path, story, num_workers=1, router_timeout_s=0.05, failover_timeout_s=4.0)


def test_the_first_request_of_a_gateway_waits_for_a_worker(tmp_path: Path) -> None:
    """Regression: a gateway that had never seen a worker refused requests at once."""

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        answer = asyncio.create_task(stream(client))
        done, _ = await asyncio.wait({answer}, timeout=0.2)
        assert not done
        worker = FakeWorker("decode-0", Tokenizer.load(cluster.directory))
        await worker.serve()
        cluster.routers[0].workers.append(worker)
        assert await answer == (RIGHT, None)
        await worker.kill()

    tell(tmp_path, story, num_workers=0, failover_timeout_s=20.0)


def test_a_router_that_knows_no_worker_yet_is_not_believed_while_another_does(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        await eventually(lambda: cluster.gateway.gateway.model_info.known is not None)
        cluster.routers[0].workers.clear()
        assert await stream(client) == (RIGHT, None)

    tell(tmp_path, story, num_routers=2)


def test_routers_hear_what_became_of_each_choice(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        settled = cluster.routers[0].settled
        await client.post("/v1/completions", json=body(n=2), headers={"x-request-id": "mine"})
        await eventually(lambda: len(settled) == 2)
        assert {settlement.request_id for settlement in settled} == {"mine/0", "mine/1"}
        assert all(s.prefill_ms == 2.0 and s.ttft_ms is not None and s.ttft_ms > 0 for s in settled)
        cluster.workers[0].fail_at = 2
        await client.post("/v1/completions", json=body(), headers={"x-request-id": "moved"})
        await eventually(lambda: len(settled) == 3)
        assert settled[-1].request_id == "moved"
        assert settled[-1].ttft_ms is None

    tell(tmp_path, story)


def test_each_choice_has_one_pairing_that_no_other_request_shares(tmp_path: Path) -> None:
    """Requests of one id too. A request that is paired again keeps its own."""

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        calls, settled = cluster.routers[0].calls, cluster.routers[0].settled
        for fail_at in (None, 2):
            cluster.workers[0].fail_at = fail_at
            await client.post("/v1/completions", json=body(), headers={"x-request-id": "mine"})
        await eventually(lambda: len(settled) == 2)
        first, second, again = (call.pairing_id for call in calls)
        assert first != second == again
        assert [settlement.pairing_id for settlement in settled] == [first, second]

    tell(tmp_path, story)


def test_a_router_of_a_release_too_far_away_is_a_503_and_the_log_names_both(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: strict equality of versions was answered as 500, as if the gateway had a bug."""

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        cluster.routers[0].refuse = IncompatibleProtocolError(
            "the caller speaks protocols 2 to 2, this process 7 to 8; run releases of Tandem that are at most one apart"
        )
        for _ in range(2):
            response = await client.post("/v1/completions", json=body(stream=False))
            assert (response.status_code, response.json()["error"]["code"]) == (503, "incompatible_releases")
            assert "protocol" not in response.text
        (told,) = [line for line in messages(caplog) if line.startswith("router 127.0.0.1")]
        assert "protocols 2 to 2, this process 7 to 8; run releases" in told
        cluster.routers[0].refuse = None
        assert await stream(client) == (RIGHT, None)

    tell(tmp_path, story, failover_timeout_s=0.2)


ANOTHER_SECRET = b"the secret of another cluster"
REMEDY = "give every process the same cluster secret"


def expect_misconfigured(response: httpx.Response) -> None:
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (503, "cluster_misconfigured")
    assert int(response.headers["retry-after"]) > 0
    assert "127.0.0.1" not in response.text
    assert "secret" not in response.text


def test_routers_that_refuse_the_gateway_are_passed_over_and_are_together_a_503(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: the answer was 500 with the operator's remedy, logged nowhere, and no other router was asked."""

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        for router in cluster.routers:
            await router.start_again(replace(AS_ROUTER, secret=ANOTHER_SECRET))
        await eventually(lambda: len(refusals(caplog)) == 2)
        expect_misconfigured(await client.post("/v1/completions", json=body(stream=False)))
        named = {line.partition(" cannot be used until this is mended: ")[0] for line in refusals(caplog)}
        assert named == {f"router {address}" for address in cluster.gateway.gateway.routers.addresses}
        assert len(refusals(caplog)) == 2
        await cluster.routers[1].start_again(AS_ROUTER)
        assert await stream(client) == (RIGHT, None)

    with caplog.at_level(logging.ERROR, logger="tandem.gateway.routers"):
        tell(tmp_path, story, num_routers=2)


def test_a_worker_that_does_not_accept_the_gateway_is_passed_over_and_alone_a_503(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: it was answered as 500 at once, though another worker could serve."""

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        first, second = cluster.workers
        await first.start_again("first", replace(serving_as("first"), secret=ANOTHER_SECRET))
        assert await stream(client) == (RIGHT, None)
        assert not first.calls
        assert any(REMEDY in line for line in messages(caplog))
        await second.start_again("first", serving_as("first", ProcessRole.ROUTER))
        expect_misconfigured(await client.post("/v1/completions", json=body(stream=False)))
        assert any("is a router; a both or decode or prefill was expected there" in line for line in messages(caplog))
        assert len(second.calls) == 1

    tell(tmp_path, story, failover_timeout_s=0.5)


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in messages(caplog) if REMEDY in line]
