"""An asyncio loop in a thread of its own, so that a cluster lives beside tests that block."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    """Runs coroutines on its loop and hands back what they return."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cluster")

    def __enter__(self) -> "Background":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = 300) -> T:
        """Run it to its end on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    @contextmanager
    def entered(self, manager: AbstractAsyncContextManager[T]) -> Iterator[T]:
        """An asynchronous context for the time of a block; entered and left by one task."""
        entered: asyncio.Future[T] = self.call(_future())
        leave = self.call(_event())
        task = asyncio.run_coroutine_threadsafe(_stay(manager, entered, leave), self._loop)
        try:
            yield self.call(_wait(entered))
        finally:
            self._loop.call_soon_threadsafe(leave.set)
            task.result(300)


async def _future() -> "asyncio.Future[Any]":
    return asyncio.get_running_loop().create_future()


async def _event() -> asyncio.Event:
    return asyncio.Event()


async def _wait(future: "asyncio.Future[T]") -> T:
    return await future


async def _stay(manager: AbstractAsyncContextManager[T], entered: "asyncio.Future[T]", leave: asyncio.Event) -> None:
    try:
        async with manager as value:
            entered.set_result(value)
            await leave.wait()
    except BaseException as error:
        if entered.done():
            raise
        entered.set_exception(error)
