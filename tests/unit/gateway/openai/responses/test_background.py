"""Responses that run on without their client: polled, cancelled, deleted, and never silently gone."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.core.clock import ManualClock
from tandem.core.errors import InvalidRequestError
from tandem.gateway import server
from tandem.gateway.openai.responses.store import EmbeddedResponseStore, StoredResponse
from tests.helpers import fake_backend as backend
from tests.helpers.fake_backend import FakeCluster, eventually, sdk
from tests.helpers.fake_worker import MODEL
from tests.unit.gateway.openai.responses.stage import Stage, staged, tell

ASKED: dict[str, Any] = {"model": MODEL, "input": "hi", "background": True}


class SlowStore(EmbeddedResponseStore):
    """Its call number `slow_call` of `put` does not end."""

    def __init__(self, slow_call: int) -> None:
        super().__init__()
        self.reached = asyncio.Event()
        self._num_left = slow_call

    async def put(self, tenant: str, entry: StoredResponse, *, over_running: bool = False) -> bool:
        self._num_left -= 1
        if not self._num_left:
            self.reached.set()
            await asyncio.Event().wait()
        return await super().put(tenant, entry, over_running=over_running)


async def ended(stage: Stage, response_id: str) -> dict[str, Any]:
    async with asyncio.timeout(5):
        while True:
            got: dict[str, Any] = (await stage.client.get(f"/v1/responses/{response_id}")).json()
            if got["status"] not in ("queued", "in_progress"):
                return got
            await asyncio.sleep(0.002)


def test_it_runs_on_and_is_polled(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.worker.hold_at = 4
        async with stage.sdk() as api:
            begun = await api.responses.create(model=MODEL, input="hi", background=True)
            assert (begun.status, begun.output, begun.background) == ("queued", [], True)
            await stage.worker.reached.wait()
            assert (await api.responses.retrieve(begun.id)).status == "in_progress"
            refused = await stage.client.get(f"/v1/responses/{begun.id}?stream=true")
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")
            chained = {"model": MODEL, "input": "?", "previous_response_id": begun.id}
            assert (await stage.client.post("/v1/responses", json=chained)).status_code == 400
            stage.worker.go.set()
            await ended(stage, begun.id)
            done = await api.responses.retrieve(begun.id)
            assert (done.status, done.output_text) == ("completed", "hello, world")
            assert (await api.responses.cancel(begun.id)).status == "completed"
            more = await api.responses.create(model=MODEL, input="more", previous_response_id=begun.id)
            assert more.output_text == "again"
        await eventually(lambda: stage.service.background.num_running == 0)
        await eventually(lambda: stage.gateway.admission.num_open == 0)

    tell(tmp_path, story, "hello, world", "again")


def test_a_gateway_drains_for_them_no_longer_than_for_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time counts from the signal, not from the last connection's end."""
    clock, drain_timeout_s = ManualClock(), 3600.0
    monkeypatch.setattr(server, "SystemClock", lambda: clock)

    async def run() -> None:
        options: dict[str, Any] = {"drain_timeout_s": drain_timeout_s, "silent_after_s": 100 * drain_timeout_s}
        async with asyncio.timeout(20), backend.running_cluster(tmp_path, num_workers=1, **options) as cluster:
            (worker,) = cluster.workers
            worker.hold_at = 1
            async with httpx.AsyncClient(base_url=cluster.url, verify=False) as client:
                await client.post("/v1/responses", json=ASKED)
            await worker.reached.wait()
            cluster.gateway.stop()
            await cluster.finished.wait()
            clock.advance(drain_timeout_s)

    asyncio.run(run())


def test_a_gateway_that_is_told_once_gives_them_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        options: dict[str, Any] = {"drain_timeout_s": 3600.0, "silent_after_s": 7200.0}
        async with asyncio.timeout(20), backend.running_cluster(tmp_path, num_workers=1, **options) as cluster:
            (worker,) = cluster.workers
            service = cluster.gateway.gateway.responses
            worker.hold_at = 1
            close = service.close

            async def closing(timeout_s: float = 0.0) -> None:
                worker.go.set()  # NOTE: not before, so that it still runs
                await close(timeout_s)

            monkeypatch.setattr(service, "close", closing)
            async with httpx.AsyncClient(base_url=cluster.url, verify=False) as client:
                begun = (await client.post("/v1/responses", json=ASKED)).json()
            await worker.reached.wait()
            cluster.gateway.stop()
            await cluster.finished.wait()
        found = await service.store.find("", begun["id"])
        assert found is not None
        assert (found.response["status"], found.response["error"]) == ("incomplete", None)

    asyncio.run(run())


def test_a_gateway_that_gives_them_time_may_be_told_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with staged(tmp_path, "hello, world") as stage:
            stage.worker.hold_at = 4
            begun = (await stage.client.post("/v1/responses", json=ASKED)).json()
            await stage.worker.reached.wait()
            closing = asyncio.create_task(stage.service.close(3600.0))
            await asyncio.sleep(0)
            assert not closing.done()
            stage.service.background.leave()
            async with asyncio.timeout(10):
                await closing
            left = (await stage.client.get(f"/v1/responses/{begun['id']}")).json()
            assert (left["status"], "stopped" in left["error"]["message"]) == ("failed", True)

    asyncio.run(story())


def test_an_answer_that_was_being_stored_when_its_gateway_stopped_is_stored(tmp_path: Path) -> None:
    """The bug: it was marked running until its lease had ended, and lost."""
    store = SlowStore(2)

    async def story() -> None:
        async with asyncio.timeout(20), staged(tmp_path, "hello, world", store=store) as stage:
            begun = (await stage.client.post("/v1/responses", json=ASKED)).json()
            await store.reached.wait()
            await stage.service.close()
            assert (await stage.client.get(f"/v1/responses/{begun['id']}")).json()["status"] == "completed"

    asyncio.run(story())


def test_one_that_begins_when_its_gateway_stops_is_told_so(tmp_path: Path) -> None:
    store = SlowStore(1)

    async def story() -> None:
        async with asyncio.timeout(20), staged(tmp_path, store=store) as stage:
            asked = asyncio.create_task(stage.client.post("/v1/responses", json=ASKED))
            await store.reached.wait()
            stage.service.background.leave()
            got = await asked
            assert (got.status_code, got.headers["retry-after"]) == (503, "1")

    asyncio.run(story())


def test_a_gateway_that_is_told_twice_waits_for_none_of_them(tmp_path: Path) -> None:
    async def run() -> None:
        options: dict[str, Any] = {"drain_timeout_s": 3600.0, "silent_after_s": 7200.0}
        async with asyncio.timeout(20), backend.running_cluster(tmp_path, num_workers=1, **options) as cluster:
            (worker,) = cluster.workers
            worker.hold_at = 1
            async with httpx.AsyncClient(base_url=cluster.url, verify=False) as client:
                await client.post("/v1/responses", json=ASKED)
            await worker.reached.wait()
            cluster.gateway.stop()
            cluster.gateway.stop()

    asyncio.run(run())


def test_its_timeline_is_found_by_what_its_client_was_told(tmp_path: Path) -> None:
    async def run() -> None:
        async with (
            backend.running_cluster(tmp_path, num_workers=1) as cluster,
            httpx.AsyncClient(base_url=cluster.url, verify=False) as client,
        ):
            (worker,) = cluster.workers
            worker.hold_at = 1
            begun = await client.post("/v1/responses", json=ASKED, headers={"x-request-id": "mine"})
            assert begun.headers["x-request-id"] == "mine"
            await worker.reached.wait()
            assert worker.calls[0].request_id == "mine"
            other = await client.get("/health", headers={"x-request-id": "mine"})
            assert other.headers["x-request-id"] != "mine"
            worker.go.set()
            await eventually(lambda: not cluster.gateway.gateway.responses.background.num_running)
            found = (await client.get("/admin/requests/mine")).json()
            assert (found["state"], found["kind"]) == ("done", "responses")
            assert (await client.get(f"/admin/requests/{begun.json()['id']}")).json() == found
            again = await client.post("/v1/responses", json={**ASKED, "background": False})
            assert (await client.get(f"/admin/requests/{again.json()['id']}")).json()["state"] == "done"
            other = await client.get("/health", headers={"x-request-id": "mine"})
            assert other.headers["x-request-id"] == "mine"

    asyncio.run(run())


def test_it_is_cancelled(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.worker.hold_at = 4
        async with stage.sdk() as api:
            begun = await api.responses.create(model=MODEL, input="hi", background=True)
            await stage.worker.reached.wait()
            assert (await api.responses.cancel(begun.id)).status == "cancelled"
            await eventually(lambda: stage.worker.num_open == 0)
            assert (await api.responses.cancel(begun.id)).status == "cancelled"
            assert (await api.responses.retrieve(begun.id)).status == "cancelled"
        await eventually(lambda: stage.service.background.num_running == 0)
        assert (await stage.client.get(f"/v1/responses/{begun.id}")).json()["status"] == "cancelled"

    tell(tmp_path, story, "hello, world", beat_s=60.0)


def test_one_that_is_deleted_stops(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.worker.hold_at = 4
        begun = (await stage.client.post("/v1/responses", json=ASKED)).json()
        await stage.worker.reached.wait()
        assert (await stage.client.delete(f"/v1/responses/{begun['id']}")).json()["deleted"] is True
        await eventually(lambda: stage.worker.num_open == 0)
        await eventually(lambda: stage.service.background.num_running == 0)
        assert (await stage.client.get(f"/v1/responses/{begun['id']}")).status_code == 404

    tell(tmp_path, story, "hello, world", beat_s=60.0)


def test_one_that_another_gateway_cancelled_stays_cancelled(tmp_path: Path) -> None:
    """Also when it ends before this one heard of it."""

    async def story(stage: Stage) -> None:
        stage.worker.hold_at = 4
        begun = (await stage.client.post("/v1/responses", json=ASKED)).json()
        await stage.worker.reached.wait()
        cancelled = {**begun, "status": "cancelled"}
        assert await stage.service.store.put("", StoredResponse(cancelled, []), over_running=True)
        stage.worker.go.set()
        await eventually(lambda: stage.service.background.num_running == 0)
        assert (await stage.client.get(f"/v1/responses/{begun['id']}")).json() == cancelled

    tell(tmp_path, story, "hello, world", beat_s=60.0)


def test_one_that_fails_says_so(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.worker.fail_at, stage.worker.failure = 4, InvalidRequestError("no more")
        begun = (await stage.client.post("/v1/responses", json=ASKED)).json()
        failed = await ended(stage, begun["id"])
        assert (failed["status"], failed["error"]["message"]) == ("failed", "no more")

    tell(tmp_path, story, "hello, world")


def test_what_is_wrong_with_it_is_said_at_once(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        wrong: dict[str, Any] = {"temperature": -1, "stream": True, "store": False}
        for (field, value), name in zip(wrong.items(), ("temperature", "background", "store"), strict=True):
            got = await stage.client.post("/v1/responses", json={**ASKED, field: value})
            assert (got.status_code, got.json()["error"]["param"]) == (400, name)
            assert got.headers["x-request-id"]
        stage.router.workers.clear()
        assert stage.service.background.num_running == 0

    tell(tmp_path, story)


def test_a_gateway_that_stops_leaves_word(tmp_path: Path) -> None:
    async def story() -> None:
        async with staged(tmp_path, "hello, world") as stage:
            stage.worker.hold_at = 4
            begun = (await stage.client.post("/v1/responses", json=ASKED)).json()
            await stage.worker.reached.wait()
            await stage.service.background.close()
            left = (await stage.client.get(f"/v1/responses/{begun['id']}")).json()
            assert (left["status"], "stopped" in left["error"]["message"]) == ("failed", True)
            async with asyncio.timeout(10):  # NOTE: that its stream is closed reaches the worker in its own time
                while stage.worker.num_open:
                    await asyncio.sleep(0.01)

    asyncio.run(story())


def test_a_gateway_that_stops_gives_them_time(tmp_path: Path) -> None:
    async def story() -> None:
        async with staged(tmp_path, "hello, world") as stage:
            stage.worker.hold_at = 4
            begun = (await stage.client.post("/v1/responses", json=ASKED)).json()
            await stage.worker.reached.wait()
            closing = asyncio.create_task(stage.service.background.close(timeout_s=5.0))
            stage.worker.go.set()
            await closing
            assert (await stage.client.get(f"/v1/responses/{begun['id']}")).json()["status"] == "completed"

    asyncio.run(story())


def test_a_whole_gateway_serves_them(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        async with sdk(cluster) as api:
            first = await api.responses.create(model=MODEL, input="hi")
            second = await api.responses.create(model=MODEL, input="more", previous_response_id=first.id)
            assert second.previous_response_id == first.id
            cluster.workers[0].hold_at = 2
            begun = await api.responses.create(model=MODEL, input="hi", background=True)
            await cluster.workers[0].reached.wait()
            assert (await api.responses.retrieve(begun.id)).status == "in_progress"

    backend.tell(tmp_path, story)


def test_one_whose_gateway_is_gone_has_failed(tmp_path: Path) -> None:
    clock = ManualClock()

    async def story(stage: Stage) -> None:
        stage.worker.hold_at = 4
        begun = (await stage.client.post("/v1/responses", json=ASKED)).json()
        await stage.worker.reached.wait()
        clock.advance(3600)  # NOTE: before the next beat, as if there were none
        lost = (await stage.client.get(f"/v1/responses/{begun['id']}")).json()
        assert (lost["status"], "is gone" in lost["error"]["message"]) == ("failed", True)

    tell(tmp_path, story, "hello, world", store=EmbeddedResponseStore(clock=clock), beat_s=60.0)


@pytest.mark.parametrize("is_stopped", [True, False])
def test_no_more_run_than_the_gateway_takes(tmp_path: Path, is_stopped: bool) -> None:
    async def story(stage: Stage) -> None:
        stage.worker.hold_at = 4
        begun = (await stage.client.post("/v1/responses", json=ASKED)).json()
        if is_stopped:
            stage.gateway.admission.close()
        got = await stage.client.post("/v1/responses", json=ASKED)
        assert got.status_code == (503 if is_stopped else 429)
        assert got.headers["retry-after"] == "1"
        stage.worker.go.set()
        assert (await ended(stage, begun["id"]))["status"] == "completed"

    tell(tmp_path, story, "hello, world", max_concurrent_requests=1)
