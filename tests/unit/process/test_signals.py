"""A process that serves ends by a signal, or by the error of one of its tasks."""

import asyncio
import os
import signal

import pytest

from tandem.process.signals import run_until, stop_event


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_wait_and_not_the_tasks(number: signal.Signals) -> None:
    async def whole() -> None:
        stopped = stop_event()
        task = asyncio.create_task(_serve())
        os.kill(os.getpid(), number)
        await run_until(stopped, [task])
        assert not task.done()
        task.cancel()

    asyncio.run(whole())


def test_the_error_of_a_task_ends_the_process() -> None:
    async def whole() -> None:
        await run_until(asyncio.Event(), [asyncio.create_task(_break())])

    with pytest.raises(ValueError, match="a bug"):
        asyncio.run(whole())


async def _serve() -> None:
    await asyncio.Event().wait()


async def _break() -> None:
    raise ValueError("a bug")
