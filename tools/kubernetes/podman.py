"""Calls podman without blocking the event loop, and tells when a container has ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

from tools.images.host import environment


class PodmanError(RuntimeError):
    """podman refused; the message is its own."""


async def podman(*arguments: str, timeout_s: float = 120.0, with_errors: bool = False) -> str:
    """Output of podman, on both streams if asked.

    Raises:
        PodmanError: it failed, with its words.
        TimeoutError: it took longer than `timeout_s`.
    """
    process = await asyncio.create_subprocess_exec(
        "podman",
        *arguments,
        env=environment(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT if with_errors else asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(timeout_s):
            out, words = await process.communicate()
    except BaseException:
        if process.returncode is None:
            process.kill()
            await process.wait()
        raise
    if process.returncode:
        raise PodmanError(
            f"podman {arguments[0]} ended with {process.returncode}: {(words or out).decode().strip()[-2000:]}"
        )
    return out.decode().strip()


class ContainerProcess:
    """The first process of a running container: signalled and waited for by the kernel, not by podman.

    NOTE: stops by podman have been seen to take most of a minute on a busy machine; grace cannot wait for that.
    """

    def __init__(self, pid_file: Path) -> None:
        self.ended = asyncio.Event()
        self.ended_s: float | None = None
        self._loop = asyncio.get_running_loop()
        self._handle: int | None = None
        try:
            self._handle = os.pidfd_open(int(pid_file.read_text()))
        except ProcessLookupError:
            self._note_end()
        else:
            self._loop.add_reader(self._handle, self._note_end)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens when it has ended."""
        if self._handle is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def close(self) -> None:
        """Stop watching it."""
        if self._handle is not None:
            self._loop.remove_reader(self._handle)
            os.close(self._handle)
            self._handle = None

    def _note_end(self) -> None:
        self.ended_s = self._loop.time()
        self.ended.set()
        self.close()
