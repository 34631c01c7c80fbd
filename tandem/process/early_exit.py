"""Ends a service that is told to stop while it still imports. On the standard library alone, so that it costs no time.

The first process of a container gets no signal that it does not handle: SIGTERM would be lost, and the container run
until it is killed.
"""

import os
import signal
from types import FrameType
from typing import NoReturn


def exit_while_importing() -> None:
    """Makes SIGTERM and SIGINT end the process at once with exit code 0, until the event loop installs other handlers.

    A signal that the parent has this process ignore stays ignored, as a supervisor's child ignores Ctrl-C.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _exit)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(0)
