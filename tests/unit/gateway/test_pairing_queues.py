"""Queues of requests that no live worker can serve: the first of each kind asks, and no kind waits for another."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from prometheus_client import CollectorRegistry, Gauge

from tandem.core.errors import CapacityError, UnavailableError
from tandem.gateway.history import RequestRecord
from tandem.gateway.pairing_queue import PairingQueue, Refusal
from tandem.gateway.pairing_queues import PairingQueues
from tests.helpers.fake_backend import MODEL, eventually


class Outage:
    """Queues during an outage, and a log of their questions. `served`: needs that can be met now."""

    def __init__(self, timeout_s: float = 20.0) -> None:
        self.served: set[str] = set()
        self.asked: list[str] = []
        self.told: list[tuple[str, str, bool]] = []  # who asked, in which queue, and whether others wait behind
        self.refusal: Refusal = UnavailableError("nobody is there", 0.01)
        self.waiting = Gauge("waiting", "in queue", registry=CollectorRegistry())
        self.queues = PairingQueues(0.0, timeout_s, self.waiting)

    @property
    def num_waiting(self) -> int:
        (sample,) = [sample for family in self.waiting.collect() for sample in family.samples]
        return int(sample.value)

    def enter(self, name: str, needs: str, is_retry: bool = False) -> "asyncio.Task[str]":
        async def question(queue: PairingQueue) -> str:
            self.asked.append(name)
            self.told.append((name, queue.name, queue.others_wait))
            if needs not in self.served:
                raise self.refusal
            return name

        record = RequestRecord(name, MODEL, 0.0)
        return asyncio.create_task(self.queues.run(needs, is_retry, 0, question, record))


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
        waits = outage.enter("begun", "any", is_retry=True)
        await eventually(lambda: outage.asked.count("begun") > 1)
        outage.served.add("any")
        assert await waits == "begun"
        assert len(outage.queues) == 0

    told(story)


def test_questions_name_their_queue_and_whether_others_wait_behind() -> None:
    async def story(outage: Outage) -> None:
        begun = [outage.enter(name, "old version", is_retry=True) for name in ("o1", "o2")]
        new = outage.enter("n1", "new version")
        await eventually(lambda: len(outage.asked) > 10)
        outage.served |= {"old version", "new version"}
        await asyncio.gather(*begun, new)
        old, other = ({queue for name, queue, _ in outage.told if name[0] == kind} for kind in "on")
        assert len(old) == len(other) == len(old - other) == 1
        assert not any(others_wait for name, _, others_wait in outage.told if name == "n1")
        assert [others_wait for name, _, others_wait in outage.told if name[0] == "o"][-2:] == [True, False]

    told(story)


def test_the_wait_is_bounded_and_the_last_refusal_is_the_answer() -> None:
    async def story(outage: Outage) -> None:
        with pytest.raises(UnavailableError, match=r"nobody is there; the request has waited 0\.2 s") as refused:
            await outage.enter("a", "any")
        assert refused.value.retry_after_s == 0.01
        assert len(outage.queues) == 0

    told(story, timeout_s=0.2)
