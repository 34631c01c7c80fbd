"""Runs the `tandem` command, or another module, as forks of a process that has imported it (`fork_server`).

The processes are as real as others, and begin at once. A test of a process's start, of its encoding or of a reader that
leaves starts one of its own instead.
"""

import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.helpers.fork_server import ROOT, SERVER, ForkedProcess

MODULE = "tandem.cli.main"


def environment(**variables: str) -> dict[str, str]:
    """The tests' own variables but for those of Tandem, and `variables`."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    return {**own, "PYTHONPATH": str(ROOT), **variables}


def started(
    *arguments: str | Path,
    output: int,
    module: str = MODULE,
    errors: int | None = None,
    given: int | None = None,
    env: Mapping[str, str] | None = None,
    directory: Path = ROOT,
) -> ForkedProcess:
    """A running command. `output`, `errors`, `given`: descriptors of its standard streams, which stay the caller's."""
    return SERVER.start(
        *(module, [str(each) for each in arguments], environment() if env is None else env, (), output),
        errors=errors,
        given=given,
        directory=directory,
    )


def run(
    *arguments: str | Path,
    module: str = MODULE,
    given: str = "",
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. Raises `subprocess.TimeoutExpired`."""
    with tempfile.TemporaryFile() as typed, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        typed.write(given.encode())
        typed.seek(0)
        process = started(
            *arguments, module=module, output=output.fileno(), errors=errors.fileno(), given=typed.fileno(), env=env
        )
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
        output.seek(0)
        errors.seek(0)
        command = [module, *map(str, arguments)]
        return subprocess.CompletedProcess(command, code, output.read().decode(), errors.read().decode())
