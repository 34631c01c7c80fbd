"""The helper by which tests start services: it must outlive whatever is asked of it."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.helpers.fork_server import AT_IMPORT, SERVER, ForkedProcess


def test_a_process_that_two_ask_for_has_ended_for_both(tmp_path: Path) -> None:
    """The second question for an exit code ended the server, and with it every later test of this process."""
    with (tmp_path / "out").open("w") as out:
        process = SERVER.start("this", (), AT_IMPORT, (), out.fileno())
        another = ForkedProcess(SERVER, process.pid)
        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(lambda each: each.wait(20), (process, another))) == [0, 0]
        another.wait_stopped()
        again = SERVER.start("this", (), AT_IMPORT, (), out.fileno())
        assert again.wait(20) == 0
    assert SERVER.pid is not None
    os.kill(SERVER.pid, 0)
