"""Handling of SIGTERM and SIGINT in a process that is still starting."""

import asyncio
import os
import signal


def exit_when_told() -> None:
    """Until the event loop is given other handlers, both signals end the process at once, with 0.

    NOTE: the first process of a container has no default action: without a handler a signal is lost, and whoever stops
    a pod that still loads its model waits for the whole grace period.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, os._exit, 0)
