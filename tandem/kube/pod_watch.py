"""Keeps a list of pods up to date: lists them once, then follows a watch. Reports when the list may be out of date.

Invariant: `pods` is a list of the server plus all events since; after anything that might have lost an event (410, a
broken or silent stream, invalid data) it is listed again. `failure` is None only while that holds.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.core.clock import Clock, SystemClock
from tandem.kube.errors import ExpiredError, KubeError
from tandem.kube.pod import Pod, PodEvent, PodList

_LOG = logging.getLogger(__name__)


class Pods(Protocol):
    """The part of `KubeApi` that the watch needs."""

    async def list_pods(self, selector: str) -> PodList: ...
    def watch_pods(self, selector: str, resource_version: str, watch_s: float) -> AsyncGenerator[PodEvent, None]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchTerms:
    """Durations of listing and watching, in seconds.

    Args:
        watch_s: the server ends a watch after this time, which bounds how late a dead connection is noticed.
        relist_s: everything is listed again at this interval; the longest pause that a server may ask for, too.
        first_backoff_s, max_backoff_s: between attempts while it fails; doubled each time.
    """

    watch_s: float = 30.0
    relist_s: float = 600.0
    first_backoff_s: float = 0.2
    max_backoff_s: float = 10.0


class PodWatch:
    """The pods of one selector; they are up to date only while `run` is running.

    `tried` is set once the first list has arrived or failed.
    """

    def __init__(
        self,
        api: Pods,
        selector: str,
        terms: WatchTerms | None = None,
        *,
        clock: Clock | None = None,
        jitter: random.Random | None = None,
    ) -> None:
        self._api = api
        self._selector = selector
        self._terms = terms or WatchTerms()
        self._clock = clock or SystemClock()
        self._jitter = jitter or random.Random()
        self._pods: dict[str, Pod] = {}
        self._version = ""
        self.tried = asyncio.Event()
        self.failure: KubeError | None = None

    @property
    def pods(self) -> Sequence[Pod]:
        """The last known pods, up to date or not; empty before the first list."""
        return list(self._pods.values())

    async def run(self) -> None:
        """Keeps the list up to date until cancelled."""
        num_failures = 0
        while True:
            try:
                await self._list()
                num_failures = 0
                await self._follow()
            except ExpiredError as error:
                _LOG.debug("%s; listing again", error)
            except KubeError as error:
                self._complain(error)
                num_failures += 1
            await asyncio.sleep(self._pause_s(num_failures))

    async def _list(self) -> None:
        found = await self._api.list_pods(self._selector)
        self._pods = {pod.name: pod for pod in found.pods}
        self._version = found.resource_version
        if self.failure is not None:
            _LOG.info("the Kubernetes API lists pods again")
        self.failure = None
        self.tried.set()

    async def _follow(self) -> None:
        """Runs one watch after another, each from where the last one ended, until it is time to list again."""
        until_s = self._clock.now_s() + self._jittered(self._terms.relist_s)
        while self._clock.now_s() < until_s:
            watch = self._api.watch_pods(self._selector, self._version, self._jittered(self._terms.watch_s))
            async with contextlib.aclosing(watch) as events:
                async for event in events:
                    self._take(event)
            await asyncio.sleep(self._pause_s(0))  # NOTE: a server that ends watches at once is not asked in a loop

    def _take(self, event: PodEvent) -> None:
        self._version = event.resource_version
        if event.pod is None:
            return
        if event.kind == "deleted":
            self._pods.pop(event.pod.name, None)
        else:
            self._pods[event.pod.name] = event.pod

    def _complain(self, error: KubeError) -> None:
        if self.failure is None:
            _LOG.warning("pods are not followed until the Kubernetes API answers: %s", error)
        self.failure = error
        self.tried.set()

    def _pause_s(self, num_failures: int) -> float:
        longest_s = self._terms.first_backoff_s * 2.0 ** min(num_failures, 16)
        pause_s = self._jittered(min(longest_s, self._terms.max_backoff_s))
        asked_s = (self.failure.retry_after_s or 0.0) if self.failure is not None else 0.0
        return max(pause_s, min(asked_s, self._terms.relist_s))

    def _jittered(self, seconds: float) -> float:
        return seconds * self._jitter.uniform(0.75, 1.0)
