"""A process that serves ends by a signal, or by the error of one of its tasks."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

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


IMPORTS = """
import signal
print("ignores" if signal.getsignal(signal.SIGINT) is signal.SIG_IGN else "hears", flush=True)
signal.pause()
"""
ROOT = Path(__file__).parents[3]
SERVICES = sorted(path.parent.name for path in (ROOT / "services").glob("*/__main__.py"))


def _importing(module: str, folder: Path, launcher: str = "", arguments: str = "") -> "subprocess.Popen[str]":
    """A process whose import of its settings never ends; its first line says whether it hears SIGINT."""
    (folder / "pydantic_settings.py").write_text(IMPORTS)
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    command = ["/bin/sh", "-c", f'{launcher} exec "$@"', "sh", sys.executable, "-m", module, *arguments.split()]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("service", SERVICES)
def test_a_service_that_still_imports_ends_at_once(service: str, number: signal.Signals, tmp_path: Path) -> None:
    """Regression: SIGINT gave a traceback, and the first process of a container never got SIGTERM and served on."""
    with _importing(f"services.{service}", tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "hears\n"
        process.send_signal(number)
        said, _ = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "")


def test_ctrl_c_while_a_command_imports_says_nothing(tmp_path: Path) -> None:
    """Regression: it printed a traceback."""
    with _importing("tandem.cli.main", tmp_path, arguments="plan") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "hears\n"
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "")


@pytest.mark.parametrize("service", SERVICES)
def test_ctrl_c_that_a_supervisor_has_its_child_ignore_stays_ignored(service: str, tmp_path: Path) -> None:
    with _importing(f"services.{service}", tmp_path, "trap '' INT;") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ignores\n"
        process.terminate()
        assert process.wait(60) == 0


async def _serve() -> None:
    await asyncio.Event().wait()


async def _break() -> None:
    raise ValueError("a bug")
