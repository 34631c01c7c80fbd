"""Handles SIGTERM and SIGINT: for a process that is still starting, and for one that serves until it is stopped."""

import asyncio
import os
import signal
from collections.abc import Iterable

_BOTH = (signal.SIGTERM, signal.SIGINT)


def exit_when_told() -> None:
    """Makes both signals end the process at once with exit code 0, until the event loop installs other handlers."""
    for number in _BOTH:
        asyncio.get_running_loop().add_signal_handler(number, os._exit, 0)


def stop_event() -> asyncio.Event:
    """Returns an event that each of the signals sets from now on, instead of ending the process."""
    stopped = asyncio.Event()
    for number in _BOTH:
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    return stopped


async def run_until(stopped: asyncio.Event, tasks: Iterable[asyncio.Task[None]]) -> None:
    """Waits until `stopped` is set, or until one of the tasks ends.

    Raises:
        Exception: what a task raised that ended; such a task has a bug, which is to end the process with a traceback.
    """
    stop = asyncio.create_task(stopped.wait())
    ended, _ = await asyncio.wait((stop, *tasks), return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    for task in ended:
        task.result()
