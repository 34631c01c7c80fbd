"""The queue for workers: who gets room first, who asks, who gives up and when, and what clients see of it."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge

from tandem.core.errors import CapacityError, NoRoomError, UnavailableError
from tandem.gateway import pairing_queue
from tandem.gateway.history import RequestRecord
from tandem.gateway.pairing_queue import PairingQueue, QueueTimeouts
from tandem.routing.waiting import KEPT_S
from tandem.simulation.loop import VirtualLoop
from tests.helpers.fake_backend import MODEL, FakeCluster, eventually, tell, text_of

BODY: dict[str, Any] = {"model": MODEL, "prompt": "abc", "seed": 5, "max_tokens": 10}


class Room:
    """Places that are asked for: `free` of them can be had; none while the workers are `lost`. Remembers who asked and
    who got one.
    """

    def __init__(self, room_s: float = 20.0, outage_s: float = 5.0) -> None:
        self.free = 0
        self.is_lost = False
        self.asked: list[str] = []
        self.got: list[str] = []
        self.waiting = Gauge("waiting", "in queue", registry=CollectorRegistry())
        self.queue = PairingQueue(QueueTimeouts(NoRoomError, room_s, outage_s), self.waiting)
        self.records: dict[str, RequestRecord] = {}

    def enter(self, name: str, priority: int = 0) -> asyncio.Task[str]:
        self.records[name] = RequestRecord(name, MODEL, 0.0)
        return asyncio.create_task(self.queue.run(priority, lambda: self._question(name), self.records[name]))

    async def entered(self, name: str, priority: int = 0) -> asyncio.Task[str]:
        """Once it is queued."""
        num_waiting = self.num_waiting
        task = self.enter(name, priority)
        await eventually(lambda: self.num_waiting > num_waiting)
        return task

    async def _question(self, name: str) -> str:
        self.asked.append(name)
        await asyncio.sleep(0)
        if self.is_lost:
            raise UnavailableError(f"nobody for {name}", 0.01)
        if not self.free:
            raise NoRoomError(f"full for {name}", 0.01)
        self.free -= 1
        self.got.append(name)
        return name

    @property
    def num_waiting(self) -> int:
        (sample,) = [sample for family in self.waiting.collect() for sample in family.samples]
        return int(sample.value)


def told(story: Callable[[Room], Awaitable[None]], room_s: float = 20.0, outage_s: float = 5.0) -> None:
    """Tell a story in virtual time."""

    async def run() -> None:
        await story(Room(room_s, outage_s))

    loop = VirtualLoop("queue")
    try:
        loop.run_until_complete(run())
    finally:
        loop.tear_down()


async def end_of(task: "asyncio.Task[str]") -> tuple[str, float]:
    """Its result, or the kind of its error, and the time in seconds."""
    try:
        result = await task
    except (CapacityError, UnavailableError) as error:
        result = type(error).__name__
    return result, asyncio.get_running_loop().time()


def test_with_room_nobody_stands_in_line() -> None:
    async def story(room: Room) -> None:
        room.free = 2
        tasks = [room.enter(name) for name in "ab"]
        assert await asyncio.gather(*tasks) == ["a", "b"]
        assert (room.num_waiting, room.records["a"].stages()) == (0, [])

    told(story)


def test_who_came_first_gets_room_first_and_only_the_first_asks() -> None:
    async def story(room: Room) -> None:
        tasks = [await room.entered(name) for name in "abcd"]
        await eventually(lambda: len(room.asked) > 5)
        assert set(room.asked) == {"a"}
        room.free = 3
        assert await asyncio.gather(*tasks[:3]) == ["a", "b", "c"]
        assert room.got == ["a", "b", "c"]
        assert room.num_waiting == 1
        assert [stage.name for stage in room.records["c"].stages()] == ["room"]
        late = await room.entered("late")
        room.free = 2
        assert await tasks[3] == "d"
        assert await late == "late"
        assert room.got[3:] == ["d", "late"]

    told(story)


def test_those_refused_at_the_same_time_stand_in_the_order_they_came() -> None:
    async def story(room: Room) -> None:
        tasks = [room.enter(name) for name in "abcdef"]
        await eventually(lambda: room.num_waiting == 6)
        room.free = 6
        await asyncio.gather(*tasks)
        assert room.got == list("abcdef")

    told(story)


def test_the_more_urgent_goes_first_though_the_other_has_asked_already() -> None:
    async def story(room: Room) -> None:
        tasks = [await room.entered("plain"), await room.entered("urgent", -5), await room.entered("patient", 5)]
        room.asked.clear()
        await eventually(lambda: len(room.asked) > 1)
        assert set(room.asked) == {"urgent"}
        room.free = 3
        await asyncio.gather(*tasks)
        assert room.got == ["urgent", "plain", "patient"]

    told(story)


def test_who_leaves_or_fails_makes_way() -> None:
    async def story(room: Room) -> None:
        first, second, third = [await room.entered(name) for name in "abc"]
        first.cancel()
        second.cancel()
        room.free = 1
        assert await third == "c"
        assert room.num_waiting == 0

        async def refused() -> str:
            raise CapacityError("the first token is 90 s away")

        waits = await room.entered("d")
        fails = asyncio.create_task(room.queue.run(-9, refused, RequestRecord("refused", MODEL, 0.0)))
        with pytest.raises(CapacityError, match=r"^the first token is 90 s away$"):
            await fails
        room.free = 1
        assert await waits == "d"

    told(story)


def test_the_wait_is_bounded_and_the_refusal_says_why() -> None:
    async def story(room: Room) -> None:
        tasks = [room.enter(name) for name in "ab"]
        for task in tasks:
            with pytest.raises(NoRoomError, match=r"full for [ab]; the request has waited 0\.2 s") as refused:
                await task
            assert refused.value.retry_after_s == 0.01
        assert room.num_waiting == 0

    told(story, room_s=0.2)


def test_without_patience_the_refusal_is_passed_on() -> None:
    async def story(room: Room) -> None:
        for _ in range(2):
            with pytest.raises(NoRoomError, match=r"^full for a$"):
                await room.enter("a")
        assert room.asked == ["a", "a"]

    told(story, room_s=0.0)


def test_when_the_workers_are_lost_all_who_wait_for_room_are_refused_once_the_outage_has_lasted() -> None:
    """Regression: one after another came to the head and waited the whole time; the rest were told 60 s later that
    there was no room.
    """

    async def story(room: Room) -> None:
        early = [await room.entered(f"early {number}") for number in range(8)]
        await asyncio.sleep(2.0 - asyncio.get_running_loop().time())
        room.is_lost = True
        await asyncio.sleep(3.0)
        late = await room.entered("late")
        assert set(room.asked) == {"early 0"}
        ends = await asyncio.gather(*(end_of(task) for task in [*early, late]))
        assert {kind for kind, _ in ends} == {"UnavailableError"}
        assert [end_s for _, end_s in ends[:8]] == pytest.approx([7.0] * 8, abs=0.1)
        assert ends[8][1] == pytest.approx(10.0, abs=0.1)
        assert [stage.name for stage in room.records["early 3"].stages()] == ["room", "outage"]
        assert room.num_waiting == 0

    told(story)


def test_after_an_outage_those_who_wait_may_ask_and_wait_for_room_as_long_as_before() -> None:
    async def story(room: Room) -> None:
        room.is_lost = True
        tasks = [await room.entered(name) for name in "abc"]
        await asyncio.sleep(4.9 - asyncio.get_running_loop().time())
        room.is_lost, room.free = False, 1
        ends = await asyncio.gather(*map(end_of, tasks))
        assert [kind for kind, _ in ends] == ["a", "NoRoomError", "NoRoomError"]
        assert [end_s for _, end_s in ends[1:]] == pytest.approx([20.0] * 2, abs=0.1)

    told(story)


def test_each_outage_is_waited_for_anew_and_room_no_longer_than_from_arrival() -> None:
    async def story(room: Room) -> None:
        task = await room.entered("a")
        for since_s in (4.0, 8.0, 12.0, 16.0, 19.0):
            await asyncio.sleep(since_s - asyncio.get_running_loop().time())
            room.is_lost = not room.is_lost
        assert room.is_lost
        kind, end_s = await end_of(task)
        assert kind == "UnavailableError"
        assert end_s == pytest.approx(24.0, abs=0.3)

        task = await room.entered("b")
        room.is_lost = False
        kind, end_s = await end_of(task)
        assert kind == "NoRoomError"
        assert end_s == pytest.approx(44.0, abs=0.3)

    told(story)


def test_who_does_not_wait_for_room_waits_for_workers() -> None:
    async def story(room: Room) -> None:
        assert not room.queue.name
        room.is_lost = True
        tasks = [await room.entered(name) for name in "ab"]
        room.is_lost, room.free = False, 1
        assert await tasks[0] == "a"
        with pytest.raises(NoRoomError, match=r"^full for b$"):
            await tasks[1]

    told(story, room_s=0.0)


def test_who_does_not_wait_for_workers_waits_for_room() -> None:
    async def story(room: Room) -> None:
        tasks = [await room.entered(name) for name in "ab"]
        room.is_lost = True
        for name, task in zip("ab", tasks, strict=True):
            with pytest.raises(UnavailableError, match=f"^nobody for {name}$"):
                await task

    told(story, outage_s=0.0)


def test_clients_of_a_full_cluster_wait_and_are_served(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        (router,) = cluster.routers
        router.refuse = NoRoomError("every decode worker's KV cache is full", 30.0)
        answers = [asyncio.create_task(client.post("/v1/completions", json=BODY)) for _ in range(8)]
        left = asyncio.create_task(client.post("/v1/completions", json=BODY))
        gauge = 'vllm:num_requests_waiting{engine="0",model_name="' + MODEL + '"} '
        await shown(client, gauge + "9.0")
        left.cancel()
        await shown(client, gauge + "8.0")
        router.refuse = None
        for answer in answers:
            response = await answer
            assert response.json()["choices"][0]["text"] == text_of(5, 10)
            assert "room;dur=" in response.headers["server-timing"]
        assert gauge + "0.0" in (await client.get("/metrics")).text
        waited = await client.get(f"/admin/requests/{response.headers['x-request-id']}")
        names = [stage["name"] for stage in waited.json()["stages"]]
        assert (names.count("room"), names.count("pair")) == (1, 1)

    tell(tmp_path, story)


def test_a_client_is_refused_when_no_room_came_or_waiting_would_not_help(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        for error, reason in (
            (NoRoomError("every decode worker's KV cache is full", 3.2), "has waited 0.2 s"),
            (CapacityError("the first token is 90 s away", 3.2), "90 s away"),
        ):
            cluster.routers[0].refuse = error
            cluster.routers[0].calls.clear()
            response = await client.post("/v1/completions", json=BODY)
            assert (response.status_code, response.headers["retry-after"]) == (429, "4")
            assert reason in response.json()["error"]["message"]
        assert len(cluster.routers[0].calls) == 1

    tell(tmp_path, story, room_timeout_s=0.2)


def test_routers_keep_a_turn_for_two_of_the_longest_pauses() -> None:
    assert KEPT_S == 2 * pairing_queue._MAX_PAUSE_S


def test_routers_are_told_the_queue_and_the_wait(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        cluster.routers[0].refuse = NoRoomError("every decode worker's KV cache is full", 0.05)
        await client.post("/v1/completions", json=BODY | {"priority": 2})
        places = [call.place for call in cluster.routers[0].calls]
        assert len(places) > 2
        assert len({place.queue for place in places if place is not None} - {""}) == 1
        waits = [place.waited_s for place in places if place is not None]
        assert waits == sorted(waits)
        assert len(waits) == len(places)
        assert -2.0 <= waits[0] < waits[-1] < 30.0

    tell(tmp_path, story, room_timeout_s=0.5)


async def shown(client: httpx.AsyncClient, line: str) -> None:
    """Wait until /metrics has it."""
    async with asyncio.timeout(5):
        while line not in (await client.get("/metrics")).text:
            await asyncio.sleep(0.002)
