"""Lines of `tandem up` about processes that are not ready yet."""

import asyncio

import pytest

from tandem.cli import up
from tandem.process.process_spec import ProcessSpec
from tandem.process.supervisor import Supervisor


def test_processes_that_are_waited_for_are_named_until_all_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "_WAITING_LINE_S", 0.001)
    lines: asyncio.Queue[str] = asyncio.Queue()

    async def story() -> None:
        specs = [ProcessSpec(name=name, argv=("true",)) for name in ("router-0", "decode-0")]
        supervisor = Supervisor(specs, lambda name, line: None, lines.put_nowait)
        waiting = asyncio.create_task(up._say_who_is_waited_for(supervisor, lines.put_nowait))
        assert await lines.get() == "starting 2 processes: router-0, decode-0"
        assert await lines.get() == "waiting for router-0, decode-0 (0 s)"
        supervisor.processes[0].ready.set()
        while (line := await lines.get()).startswith("waiting for router-0"):
            pass
        assert line.startswith("waiting for decode-0 (")
        supervisor.processes[1].ready.set()
        await waiting

    asyncio.run(asyncio.wait_for(story(), 60))
