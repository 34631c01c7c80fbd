"""Lines of those whom no live worker can serve: one of each kind asks, and no kind waits for another."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from prometheus_client import CollectorRegistry, Gauge

from tandem.core.errors import CapacityError, UnavailableError
from tandem.gateway.capacity_queue import Refusal
from tandem.gateway.history import RequestRecord
from tandem.gateway.outage_queues import OutageQueues
from tests.helpers.fake_backend import MODEL, eventually


class Outage:
    """What is asked for; `served`: needs that can be met now."""

    def __init__(self, timeout_s: float = 20.0) -> None:
        self.served: set[str] = set()
        self.asked: list[str] = []
        self.lacking: set[str] = set()  # who asked while room was lacked
        self.refusal: Refusal = UnavailableError("nobody is there", 0.01)
        self.queues = OutageQueues(timeout_s, Gauge("waiting", "in queue", registry=CollectorRegistry()))

    def enter(self, name: str, needs: str, *waits_for: type[Refusal]) -> "asyncio.Task[str]":
        async def question() -> str:
            self.asked.append(name)
            if self.queues.lack_room:
                self.lacking.add(name)
            if needs not in self.served:
                raise self.refusal
            return name

        record = RequestRecord(name, MODEL, 0.0)
        return asyncio.create_task(self.queues.run(needs, waits_for or (UnavailableError,), 0, question, record))


def told(story: Callable[[Outage], Awaitable[None]], timeout_s: float = 20.0) -> None:
    async def run() -> None:
        await story(Outage(timeout_s))

    asyncio.run(run())


def test_one_of_each_kind_asks_and_none_waits_for_another() -> None:
    async def story(outage: Outage) -> None:
        old = [outage.enter(name, "old version") for name in ("o1", "o2")]
        new = [outage.enter(name, "new version") for name in ("n1", "n2")]
        await eventually(lambda: len(outage.asked) > 10)
        assert set(outage.asked[4:]) == {"o1", "n1"}
        outage.served.add("new version")
        assert await asyncio.gather(*new) == ["n1", "n2"]
        assert len(outage.queues) == 1
        outage.served.add("old version")
        assert await asyncio.gather(*old) == ["o1", "o2"]
        assert len(outage.queues) == 0

    told(story)


def test_only_refusals_that_are_waited_for_are() -> None:
    async def story(outage: Outage) -> None:
        outage.refusal = CapacityError("full", 1.5)
        with pytest.raises(CapacityError, match=r"^full$"):
            await outage.enter("new", "any")
        waits = outage.enter("begun", "any", UnavailableError, CapacityError)
        await eventually(lambda: outage.asked.count("begun") > 1)
        outage.served.add("any")
        assert await waits == "begun"
        assert len(outage.queues) == 0

    told(story)


def test_room_is_lacked_while_a_request_that_waits_for_it_has_not_got_it() -> None:
    async def story(outage: Outage) -> None:
        new = outage.enter("new", "any")
        begun = [outage.enter(name, "begun", UnavailableError, CapacityError) for name in ("b1", "b2")]
        await eventually(lambda: outage.asked.count("b1") > 1)
        assert not outage.queues.lack_room, "without a worker there is no room that others could take"
        outage.refusal = CapacityError("full", 0.01)
        await eventually(lambda: outage.queues.lack_room)
        outage.lacking.clear()
        outage.served.add("begun")
        await asyncio.gather(*begun)
        assert "b2" in outage.lacking, "nobody else is to ask between the first and the second"
        assert not outage.queues.lack_room
        with pytest.raises(CapacityError, match="full"):
            await new

    told(story)


def test_the_wait_is_bounded_and_the_last_refusal_is_the_answer() -> None:
    async def story(outage: Outage) -> None:
        with pytest.raises(UnavailableError, match=r"nobody is there; the request has waited 0\.2 s") as refused:
            await outage.enter("a", "any")
        assert refused.value.retry_after_s == 0.01
        assert len(outage.queues) == 0

    told(story, timeout_s=0.2)
