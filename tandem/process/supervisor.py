"""Runs a set of processes as one: starts them all, restarts each that dies, and ends them all together and in order.

Invariant: when `run` has returned, none of them lives. If this process is killed, the kernel kills them (Linux).
"""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from tandem.process.process_spec import ProcessSpec, RestartPolicy
from tandem.process.supervised import Output, StartError, Supervised

INTERRUPTED_EXIT = 130  # exit code after a second SIGINT


class Supervisor:
    """Supervises `specs`. Create and use it inside one event loop, in the main thread if it is to handle signals.

    Args:
        specs: started in this order, without waiting for each other.
        output: called in the event loop with a process's name and each line that it writes; must not block.
        report: called in the event loop with a line about what happened to a process.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        output: Output,
        report: Callable[[str], None],
        policy: RestartPolicy | None = None,
    ) -> None:
        policy = policy or RestartPolicy()
        assert len({spec.name for spec in specs}) == len(specs), "names of processes are unique"
        self.processes = [Supervised(spec, policy, output, report) for spec in specs]
        self._report = report
        self._stopping = asyncio.Event()
        self._was_killed = False

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    async def run(self) -> int:
        """Supervises until SIGINT, SIGTERM, SIGHUP, `stop`, or a process that cannot start. A second SIGINT kills.

        Returns:
            The exit code: 0 after a clean end, 2 when a configuration was refused, 130 after a second SIGINT, else 1.
        """
        with self._signals():
            runs = [asyncio.create_task(process.run()) for process in self.processes]
            asked = asyncio.create_task(self._stopping.wait())
            try:
                await asyncio.wait([*runs, asked], return_when=asyncio.FIRST_COMPLETED)
                is_clean = await self._end_all()
            finally:
                for task in (*runs, asked):
                    task.cancel()
                results = await asyncio.gather(*runs, asked, return_exceptions=True)
        return self._exit_code(results, is_clean)

    async def wait_ready(self) -> None:
        """Returns when every process has become ready; waits for ever if one never does."""
        for process in self.processes:
            await process.ready.wait()

    def stop(self) -> None:
        """Ends all processes in order; `run` then returns."""
        self._stopping.set()

    def kill(self) -> None:
        """Ends all processes at once."""
        self._was_killed = True
        self._stopping.set()
        for process in self.processes:
            process.kill()

    def _exit_code(self, results: Sequence[object], is_clean: bool) -> int:
        for error in results:
            if isinstance(error, StartError):
                self._report(f"error: {error}")
                return error.exit_code
            if isinstance(error, Exception):
                raise error
        if self._was_killed:
            return INTERRUPTED_EXIT
        return 0 if is_clean else 1

    async def _end_all(self) -> bool:
        """Stops tier by tier, the highest first; returns whether all processes ended by themselves."""
        self._stopping.set()
        for process in self.processes:
            process.start_no_more()
        by_tier = sorted(self.processes, key=lambda process: -process.spec.tier)
        is_clean = True
        for _, tier in groupby(by_tier, key=lambda process: process.spec.tier):
            is_clean &= all(await asyncio.gather(*(process.stop() for process in tier)))
        return is_clean

    def _interrupt(self) -> None:
        if self._stopping.is_set():
            self.kill()
        else:
            self._report("stopping; Ctrl-C again kills at once")
            self.stop()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        handlers = {signal.SIGINT: self._interrupt, signal.SIGTERM: self.stop, signal.SIGHUP: self.stop}
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)
