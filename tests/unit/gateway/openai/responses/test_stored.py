"""Stored responses: found, listed, deleted, by their tenant alone, or told to be unstored."""

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from tandem.core.errors import UnavailableError
from tandem.gateway.known_conversations import MIN_BODY_BYTES
from tandem.gateway.openai.responses.redis_store import RedisResponseStore
from tandem.gateway.openai.responses.sealing import ResponseSealer
from tandem.gateway.openai.responses.store import EmbeddedResponseStore, StoredResponse
from tests.helpers.fake_worker import MODEL
from tests.helpers.redis_server import running_redis
from tests.helpers.secret import SECRET
from tests.unit.gateway.openai.responses.machine import check_stream
from tests.unit.gateway.openai.responses.stage import Stage, frames_of, staged, tell

SEALER = ResponseSealer([SECRET])
ASKED: dict[str, Any] = {"model": MODEL, "input": "hi"}


class AwayStore(EmbeddedResponseStore):
    """Refuses what it is told to."""

    refused: tuple[str, ...] = ()

    async def put(self, tenant: str, entry: StoredResponse, *, over_running: bool = False) -> bool:
        self._check("put")
        return await super().put(tenant, entry, over_running=over_running)

    async def find(self, tenant: str, response_id: str) -> StoredResponse | None:
        self._check("find")
        return await super().find(tenant, response_id)

    def _check(self, name: str) -> None:
        if name in self.refused:
            raise UnavailableError("the store is away", 1.0)


def test_a_response_is_found_listed_and_deleted(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        async with stage.sdk() as api:
            first = await api.responses.create(model=MODEL, input="one", metadata={"k": "v"})
            second = await api.responses.create(model=MODEL, input="two", previous_response_id=first.id)
            assert (await api.responses.retrieve(first.id)).to_dict() == first.to_dict()
            items = await api.responses.input_items.list(second.id, order="asc")
            texts = [item.content[0].text for item in items.data if item.type == "message"]  # type: ignore[union-attr]
            assert texts == ["one", "1", "two"]
            newest = await api.responses.input_items.list(second.id, limit=1)
            assert newest.has_more
            assert newest.data == items.data[-1:]
            paged = [item async for item in api.responses.input_items.list(second.id, limit=1, order="asc")]
            assert paged == items.data
            await api.responses.delete(first.id)
            with pytest.raises(openai.NotFoundError):
                await api.responses.retrieve(first.id)
            with pytest.raises(openai.NotFoundError):
                await api.responses.delete(first.id)
            with pytest.raises(openai.BadRequestError, match="was not found") as refused:
                await api.responses.create(model=MODEL, input="three", previous_response_id=first.id)
            assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")
            third = await api.responses.create(model=MODEL, input="three", previous_response_id=second.id)
        assert third.output_text == "3"
        assert "one" in stage.worker.last_prompt, "a chain outlives its first response"

    tell(tmp_path, story, "1", "2", "3")


def test_items_that_were_sent_twice_are_listed_twice_page_by_page(tmp_path: Path) -> None:
    """Pages continue behind an id: by one that occurs twice they never ended, or left items out."""

    async def story(stage: Stage) -> None:
        async with stage.sdk() as api:
            say = {"type": "message", "role": "user", "id": "same"}
            given: list[Any] = [{**say, "content": text} for text in ("a", "b")]
            first = await api.responses.create(model=MODEL, input=given)
            again: list[Any] = [{"type": "item_reference", "id": first.output[0].id}, {**say, "content": "c"}]
            second = await api.responses.create(model=MODEL, input=again, previous_response_id=first.id)
            items = (await api.responses.input_items.list(second.id, order="asc")).data
            texts = [item.content[0].text for item in items if item.type == "message"]  # type: ignore[union-attr]
            assert texts == ["a", "b", "1", "1", "c"]
            paged = items[:1]
            for _ in items[1:]:
                page = await api.responses.input_items.list(second.id, order="asc", limit=1, after=str(paged[-1].id))
                paged += page.data
            assert paged == items

    tell(tmp_path, story, "1", "2")


def test_a_long_body_without_input_goes_on_with_a_response(tmp_path: Path) -> None:
    """Regression: a body of 128 KiB or more without `input` was answered 500."""

    async def story(stage: Stage) -> None:
        first = (await stage.client.post("/v1/responses", json=ASKED)).json()
        asked = {"model": MODEL, "previous_response_id": first["id"], "client_metadata": {"x": "x" * MIN_BODY_BYTES}}
        second = await stage.client.post("/v1/responses", json=asked)
        assert (second.status_code, second.json()["status"]) == (200, "completed"), second.text

    tell(tmp_path, story, "hello", "again")


def test_a_response_belongs_to_its_tenant(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        async with stage.sdk("ours") as ours, stage.sdk("theirs") as theirs:
            response = await ours.responses.create(model=MODEL, input="secret")
            background = await ours.responses.create(model=MODEL, input="secret", background=True)
            attempts = (
                theirs.responses.retrieve(response.id),
                theirs.responses.delete(response.id),
                theirs.responses.cancel(background.id),
            )
            for attempt in attempts:
                with pytest.raises(openai.NotFoundError):
                    await attempt
            with pytest.raises(openai.NotFoundError):
                await theirs.responses.input_items.list(response.id)
            with pytest.raises(openai.BadRequestError, match="was not found"):
                await theirs.responses.create(model=MODEL, input="?", previous_response_id=response.id)
            reference: Any = [{"type": "item_reference", "id": response.output[0].id}]
            with pytest.raises(openai.BadRequestError, match="was not found"):
                await theirs.responses.create(model=MODEL, input=reference)
            assert (await ours.responses.retrieve(response.id)).output_text == "whisper"
            more = await ours.responses.create(model=MODEL, input="more", previous_response_id=response.id)
            assert more.output_text == "aloud"

    tell(tmp_path, story, "whisper", "whisper", "aloud")


def test_what_is_not_to_be_stored_is_not(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        async with stage.sdk() as api:
            response = await api.responses.create(model=MODEL, input="hi", store=False)
            assert response.to_dict()["store"] is False
            with pytest.raises(openai.NotFoundError):
                await api.responses.retrieve(response.id)
        assert isinstance(stage.service.store, EmbeddedResponseStore)
        assert stage.service.store.num_bytes == 0

    tell(tmp_path, story, "hello")


def test_a_store_that_is_away_costs_the_storing_and_nothing_else(tmp_path: Path) -> None:
    store = AwayStore()

    async def story(stage: Stage) -> None:
        first = (await stage.client.post("/v1/responses", json=ASKED)).json()
        assert first["store"] is True
        store.refused = ("put", "find")
        whole = await stage.client.post("/v1/responses", json=ASKED)
        assert (whole.status_code, whole.json()["store"], whole.json()["status"]) == (200, False, "completed")
        streamed = await stage.client.post("/v1/responses", json=ASKED | {"stream": True})
        response = check_stream(frames_of(streamed.text))
        assert (response["store"], response["status"]) == (False, "completed")
        chained = await stage.client.post("/v1/responses", json=ASKED | {"previous_response_id": first["id"]})
        assert (chained.status_code, chained.headers["retry-after"]) == (503, "1")
        assert (await stage.client.get(f"/v1/responses/{first['id']}")).status_code == 503
        background = await stage.client.post("/v1/responses", json=ASKED | {"background": True})
        assert (background.status_code, background.json()["error"]["message"]) == (503, "the store is away")
        store.refused = ()
        assert (await stage.client.get(f"/v1/responses/{first['id']}")).json() == first

    tell(tmp_path, story, *["hello"] * 5, store=store)


class LateStore(EmbeddedResponseStore):
    """A store in whose `put` the time of a request is up, as its timeout would raise it there."""

    num_put = 0

    async def put(self, tenant: str, entry: StoredResponse, *, over_running: bool = False) -> bool:
        self.num_put += 1
        raise TimeoutError


def test_time_that_is_up_while_an_answer_is_stored_gives_one_whole_error(tmp_path: Path) -> None:
    """Regression: events of a stream followed the head of a JSON answer."""
    store = LateStore()

    async def story(stage: Stage) -> None:
        whole = await stage.client.post("/v1/responses", json=ASKED)
        assert (whole.status_code, whole.json()["error"]["code"]) == (504, "timeout")
        assert store.num_put == 1
        streamed = await stage.client.post("/v1/responses", json=ASKED | {"stream": True})
        assert streamed.status_code == 200
        assert "event: response.failed" in streamed.text or "event: error" in streamed.text
        assert store.num_put == 2

    tell(tmp_path, story, "hello", "hello", store=store)


def test_an_answer_too_large_to_be_stored_is_given_all_the_same(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        got = (await stage.client.post("/v1/responses", json=ASKED)).json()
        assert (got["status"], got["store"]) == ("completed", False)
        refused = await stage.client.post("/v1/responses", json=ASKED | {"background": True, "input": "a" * 3000})
        assert (refused.status_code, refused.json()["error"]["param"]) == (413, "background")
        begun = (await stage.client.post("/v1/responses", json=ASKED | {"background": True})).json()
        while (polled := (await stage.client.get(f"/v1/responses/{begun['id']}")).json())["status"] == "in_progress":
            await asyncio.sleep(0.002)
        assert (polled["status"], polled["output"]) == ("failed", [])
        assert "could not be stored" in polled["error"]["message"]

    tell(tmp_path, story, "a" * 2000, "b" * 2000, burst=100, store=EmbeddedResponseStore(max_entry_bytes=2600))


def test_gateways_of_one_redis_share_their_responses(tmp_path: Path) -> None:
    async def story(url: str) -> None:
        paths = [tmp_path / name for name in ("one", "two")]
        for path in paths:
            path.mkdir()
        async with (
            staged(paths[0], "1", store=RedisResponseStore(url, SEALER)) as one,
            staged(paths[1], "2", store=RedisResponseStore(url, SEALER)) as two,
        ):
            first = (await one.client.post("/v1/responses", json=ASKED)).json()
            more = {"model": MODEL, "input": "more", "previous_response_id": first["id"]}
            second = (await two.client.post("/v1/responses", json=more)).json()
            assert second["status"] == "completed"
            one.worker.hold_at = 0
            one.worker.answers.append("never")
            begun = (await one.client.post("/v1/responses", json=ASKED | {"background": True})).json()
            await one.worker.reached.wait()
            cancelled = (await two.client.post(f"/v1/responses/{begun['id']}/cancel")).json()
            assert cancelled["status"] == "cancelled"
            while one.worker.num_open or one.service.background.num_running:
                await asyncio.sleep(0.002)
            assert (await one.client.get(f"/v1/responses/{begun['id']}")).json() == cancelled

    with running_redis() as server:
        asyncio.run(asyncio.wait_for(story(server.url), 20))


@pytest.mark.parametrize("method", ["GET", "DELETE", "POST"])
def test_ids_that_are_none_are_not_found(tmp_path: Path, method: str) -> None:
    async def story(stage: Stage) -> None:
        for name in ("resp_1", "resp_" + "0" * 48, "x" * 3000, "%00", "..%2F"):
            path = f"/v1/responses/{name}" + ("/cancel" if method == "POST" else "")
            got = await stage.client.request(method, path)
            assert got.status_code == 404, path
            assert got.json()["error"]["code"] == "not_found"

    tell(tmp_path, story)


def test_wrong_questions_are_refused_by_name(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        response = (await stage.client.post("/v1/responses", json=ASKED)).json()
        path = f"/v1/responses/{response['id']}"
        for query, name in (
            ("?stream=maybe", "stream"),
            ("?starting_after=1", "starting_after"),
            ("?stream=true&starting_after=-1", "starting_after"),
            ("/input_items?limit=0", "limit"),
            ("/input_items?limit=101", "limit"),
            ("/input_items?order=up", "order"),
            ("/input_items?after=nobody", "after"),
        ):
            got = await stage.client.get(path + query)
            assert (got.status_code, name in got.json()["error"]["message"]) == (400, True), query
        got = await stage.client.post(f"{path}/cancel")
        assert (got.status_code, "background" in got.json()["error"]["message"]) == (400, True)

    tell(tmp_path, story, "hello")
