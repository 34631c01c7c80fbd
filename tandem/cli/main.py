"""Entry point of the `tandem` command: finds the verb, reads its settings, runs it.

Our errors become one line and exit code 2; bugs keep their traceback.
"""

import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Protocol, cast

from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliApp, SettingsError
from rich.console import Console

from tandem import __version__
from tandem.core.errors import TandemError, shown

VERBS = {
    "generate": ("tandem.cli.generate", "Generate", "answer prompts from the command line or a JSONL file"),
    "chat": ("tandem.cli.chat", "Chat", "talk with a model in the terminal"),
}


class Verb(Protocol):
    """A settings class whose instance can be run."""

    def run(self) -> int: ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # NOTE: a terminal that lacks a character must not end an answer
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        console.print(_usage(), markup=False)
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version", "version"):
        sys.stdout.write(f"tandem {__version__}\n")
        return 0
    if arguments[0] not in VERBS:
        console.print(f"error: {arguments[0]!r} is not a verb of tandem\n\n{_usage()}", markup=False)
        return 2
    try:
        return _verb(arguments[0], arguments[1:]).run()
    except TandemError as error:
        console.print(f"error: {error}", markup=False)
    except ValidationError as error:
        for problem in error.errors():
            console.print(_setting_problem(problem["loc"], problem["msg"], problem.get("input")), markup=False)
    except SettingsError as error:
        console.print(f"error: {error}", markup=False)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 2


def _verb(name: str, arguments: list[str]) -> Verb:
    module, attribute, _ = VERBS[name]
    settings_class: type[BaseSettings] = getattr(import_module(module), attribute)
    return cast(Verb, CliApp.run(settings_class, cli_args=arguments, cli_exit_on_error=True))


def _usage() -> str:
    verbs = "\n".join(f"  tandem {name:<10} {summary}" for name, (_, _, summary) in VERBS.items())
    return f"Tandem {__version__}: disaggregated LLM serving.\n\n{verbs}\n\n`tandem VERB --help` explains its settings."


def _setting_problem(location: tuple[int | str, ...], message: str, value: object) -> str:
    flag = "--" + ".".join(str(part) for part in location).replace("_", "-")
    return f"error: {flag}={shown(value)}: {message}" if message != "Field required" else f"error: {flag} is required"


if __name__ == "__main__":
    sys.exit(main())
