"""Runs the command line of a `tandem` command or service: reads its settings, runs it, and reports errors in one line.

Exit codes: 2 for refused settings and other expected errors, 130 for Ctrl-C, 141 for a closed output pipe; bugs keep
their traceback.
"""

import argparse
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, cast, get_args

from pydantic import SecretStr, ValidationError
from pydantic_settings import BaseSettings, CliApp, CliSettingsSource, SettingsError
from rich.console import Console

from tandem.core.errors import TandemError, shown
from tandem.core.open_files import allow_sockets
from tandem.process.settings import NO_VALUE

_MAX_SOCKETS = 1 << 16  # open files that the process asks for
_NO_DEFAULTS = (f" (default: {NO_VALUE})", " (default: )")
_SCALARS = {"str": "TEXT", "SecretStr": "TEXT", "int": "N", "float": "NUMBER", "Path": "PATH"}
_VALUES = {**_SCALARS, **{f"list[{kind}]": f"{_SCALARS[kind]},..." for kind in ("int", "float")}, "list[str]": "TEXT"}
"""Words for the values of flags in place of Python's types."""
S = TypeVar("S", bound=BaseSettings)


class Command(Protocol):
    """Settings of a command, with a method that runs it."""

    def run(self) -> int: ...


def run_command(settings_class: type[S], arguments: Sequence[str], serve: Callable[[S], int] | None = None) -> int:
    """Reads the settings, runs the command, and returns the exit code. `--help` explains every setting and ends the
    process.

    Args:
        settings_class: the settings that `arguments` and the environment are read into.
        arguments: of the command line.
        serve: does the work and returns the exit code; None = the settings are a `Command`.

    A shell allows 1024 open files, which a gateway's streams and a worker's peers exceed, so the limit is raised as far
    as the system allows.
    """
    allow_sockets(_MAX_SOCKETS)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # NOTE: a terminal that lacks a character must not end an answer
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        source = _CommandLine(settings_class, cli_exit_on_error=True, formatter_class=_PlainFormatter)
        settings = CliApp.run(settings_class, cli_args=list(arguments), cli_settings_source=source)
        return cast(Command, settings).run() if serve is None else serve(settings)
    except TandemError as error:
        console.print(f"error: {error}", markup=False)
    except ValidationError as error:
        for problem in error.errors():
            console.print(
                _setting_problem(settings_class, problem["loc"], problem["msg"], problem.get("input")), markup=False
            )
    except SettingsError as error:
        console.print(f"error: {error}", markup=False)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output has closed it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 2


class _CommandLine(CliSettingsSource[BaseSettings]):
    """Keeps each text of a repeatable flag as it is; pydantic would split it at commas and interpret brackets."""

    def _merge_parsed_list(self, parsed_list: list[str], field_name: str) -> str:
        field = self.settings_cls.model_fields.get(field_name)
        if field is not None and field.annotation == list[str]:
            return json.dumps(parsed_list)
        return super()._merge_parsed_list(parsed_list, field_name)


class _PlainFormatter(argparse.RawDescriptionHelpFormatter):
    """Help text without empty defaults, whose meaning the description explains, and without names of Python types."""

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Callable[[int], tuple[str, ...]]:
        words = super()._metavar_formatter(action, default_metavar)
        return lambda size: tuple(_VALUES.get(word, word) for word in words(size))

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        for ending in _NO_DEFAULTS:
            text = text.removesuffix(ending)
        return text


def _setting_problem(
    settings_class: type[BaseSettings], location: tuple[int | str, ...], message: str, value: object
) -> str:
    message = message.removeprefix("Value error, ")
    if not location:  # NOTE: it is about several settings, and its value would be all of them, secrets too
        return f"error: {message}"
    flag = "--" + ".".join(str(part) for part in location).replace("_", "-")
    if message == "Field required":
        return f"error: {flag} is required"
    return f"error: {flag}={'***' if _is_secret(settings_class, location[0]) else shown(value)}: {message}"


def _is_secret(settings_class: type[BaseSettings], name: int | str) -> bool:
    """Whether a value must not be shown; one that belongs to no setting may be a secret whose name was mistyped."""
    field = settings_class.model_fields.get(str(name))
    return field is None or SecretStr in (field.annotation, *get_args(field.annotation))
