"""The kept list against a script of answers: what it asks after each kind of failure, and what it shows meanwhile."""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence

import pytest

from tandem.core.clock import ManualClock
from tandem.kube.call import KubeCall
from tandem.kube.errors import BadAnswerError, ExpiredError, KubeError, KubeUnavailableError
from tandem.kube.pod import Pod, PodEvent, PodList
from tandem.kube.pod_watch import PodWatch, WatchTerms

WATCH = KubeCall("watch", "pods", "n")
Answer = PodList | KubeError | Sequence[PodEvent | KubeError]
TERMS = WatchTerms(watch_s=30, relist_s=100, first_backoff_s=0.01, max_backoff_s=0.02)


def event(kind: str, name: str, version: str, ip: str = "") -> PodEvent:
    return PodEvent(kind, Pod(name=name, ip=ip), version)


class Script:
    """Answers one list or watch after the other, each watch with `meanwhile`. When all is said, it waits for ever."""

    def __init__(self, *answers: Answer, meanwhile: Callable[[], None] = lambda: None) -> None:
        self._answers = list(answers)
        self._meanwhile = meanwhile
        self.asked: list[str] = []
        self.done = asyncio.Event()

    async def _next(self) -> Answer:
        if not self._answers:
            self.done.set()
            await asyncio.Event().wait()
        return self._answers.pop(0)

    async def list_pods(self, selector: str) -> PodList:
        self.asked.append("list")
        answer = await self._next()
        if isinstance(answer, KubeError):
            raise answer
        assert isinstance(answer, PodList)
        return answer

    async def watch_pods(self, selector: str, resource_version: str, watch_s: float) -> AsyncGenerator[PodEvent, None]:
        self.asked.append(f"watch {resource_version}")
        assert 0.7 * 30 < watch_s <= 30
        answer = await self._next()
        assert not isinstance(answer, PodList | KubeError)
        self._meanwhile()
        for item in answer:
            if isinstance(item, KubeError):
                raise item
            yield item


def play(
    *answers: Answer, clock: ManualClock | None = None, meanwhile: Callable[[], None] = lambda: None
) -> tuple[PodWatch, list[str]]:
    """The watch after everything was answered, and what it asked."""

    async def main() -> tuple[PodWatch, list[str]]:
        script = Script(*answers, meanwhile=meanwhile)
        watch = PodWatch(script, "app", TERMS, clock=clock, jitter=random.Random(1))
        task = asyncio.create_task(watch.run())
        await asyncio.wait_for(script.done.wait(), 10)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return watch, script.asked

    return asyncio.run(main())


ONE = PodList((Pod(name="a"), Pod(name="b")), "5")


def shown(watch: PodWatch) -> dict[str, str]:
    return {pod.name: pod.ip for pod in watch.pods}


def test_events_change_the_list_and_the_next_watch_begins_after_them() -> None:
    watch, asked = play(
        ONE, [event("modified", "a", "6", "1"), event("deleted", "b", "7"), event("added", "c", "8")], []
    )
    assert shown(watch) == {"a": "1", "c": ""}
    assert asked == ["list", "watch 5", "watch 8", "watch 8"]


def test_a_bookmark_moves_where_the_next_watch_begins() -> None:
    _, asked = play(ONE, [PodEvent("bookmark", None, "99")])
    assert asked == ["list", "watch 5", "watch 99"]


@pytest.mark.parametrize("kind", [ExpiredError, KubeUnavailableError, BadAnswerError])
def test_whatever_may_have_lost_an_event_is_listed_anew(kind: type[KubeError]) -> None:
    watch, asked = play(ONE, [event("added", "c", "6"), kind(WATCH, "x")], PodList((Pod(name="d"),), "9"))
    assert shown(watch) == {"d": ""}
    assert asked == ["list", "watch 5", "list", "watch 9"]
    assert watch.failure is None


def test_while_it_fails_the_last_list_stays_and_the_failure_is_shown() -> None:
    gone = KubeUnavailableError(WATCH, "away")
    watch, asked = play(ONE, [gone], gone, gone)
    assert shown(watch) == {"a": "", "b": ""}
    assert watch.failure is gone
    assert asked == ["list", "watch 5", "list", "list", "list"]


def test_forgotten_versions_are_no_failure() -> None:
    watch, _ = play(ONE, [ExpiredError(WATCH, "old")])
    assert watch.failure is None


def test_now_and_then_it_lists_anew_although_nothing_failed() -> None:
    clock = ManualClock()
    _, asked = play(ONE, [], [], PodList((), "9"), clock=clock, meanwhile=lambda: clock.advance(50))
    assert asked == ["list", "watch 5", "watch 5", "list", "watch 9"]


def test_failures_are_answered_with_growing_pauses_but_a_server_that_names_one_is_obeyed() -> None:
    watch = PodWatch(Script(), "app", WatchTerms(first_backoff_s=1, max_backoff_s=10), jitter=random.Random(1))
    pauses = [watch._pause_s(number) for number in range(1, 8)]
    assert all(
        0.75 * wanted <= pause <= wanted for pause, wanted in zip(pauses, [2, 4, 8, 10, 10, 10, 10], strict=True)
    )
    watch.failure = KubeUnavailableError(WATCH, "slow down", retry_after_s=33.0)
    assert watch._pause_s(1) == 33.0


@pytest.mark.parametrize("asked_s", [3600.0, float("9" * 400)])
def test_no_server_makes_it_wait_for_longer_than_until_all_is_listed_anew(asked_s: float) -> None:
    watch = PodWatch(Script(), "app", TERMS)
    watch.failure = KubeUnavailableError(WATCH, "slow down", retry_after_s=asked_s)
    assert watch._pause_s(1) == TERMS.relist_s
