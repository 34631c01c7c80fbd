"""Runs one program to its end and hands back what it printed; a failure carries the program's own last words."""

import subprocess
from collections.abc import Mapping, Sequence

_SHOWN_CHARACTERS = 4000


class CommandError(RuntimeError):
    """A program could not be run, failed, or took too long. `returncode` is None unless it ended by itself."""

    def __init__(self, message: str, returncode: int | None = None) -> None:
        super().__init__(message)
        self.returncode = returncode


def run(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
    log: str | None = None,
    with_errors: bool = False,
) -> str:
    """The standard output of `argv`, stripped.

    Args:
        env: the whole environment; None = ours.
        with_errors: put its standard error in between, as a terminal would.
        log: file that both outputs are appended to instead, for programs that talk for minutes; then "" is returned.

    Raises:
        CommandError: it is missing, ended with another code than 0, or ran past `timeout_s`.
    """
    shown = " ".join(argv[:4])
    try:
        if log is not None:
            return _run_logged(argv, env, timeout_s, log)
        done = subprocess.run(
            argv,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if with_errors else subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError as error:
        raise CommandError(f"{argv[0]} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"{shown} ... ran past {timeout_s:g} s") from error
    if done.returncode != 0:
        raise CommandError(
            f"{shown} ... ended with {done.returncode}: {(done.stderr or done.stdout)[-_SHOWN_CHARACTERS:].strip()}",
            done.returncode,
        )
    return done.stdout.strip()


def _run_logged(argv: Sequence[str], env: Mapping[str, str] | None, timeout_s: float, log: str) -> str:
    with open(log, "a+", errors="replace") as file:
        start = file.seek(0, 2)
        done = subprocess.run(argv, env=env, stdout=file, stderr=file, timeout=timeout_s, check=False)
        if done.returncode != 0:
            file.seek(start)
            words = file.read()[-_SHOWN_CHARACTERS:].strip()
            raise CommandError(f"{' '.join(argv[:4])} ... ended with {done.returncode}: {words}", done.returncode)
    return ""
