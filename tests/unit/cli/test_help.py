"""The help of each command says what happens where a flag is left out."""

import re

import pytest
from pydantic_settings import BaseSettings

from tandem.cli.chat import ChatCommand
from tandem.cli.convert import ConvertCommand
from tandem.cli.generate import GenerateCommand
from tandem.cli.keys import CreateKey, ListKeys, RevokeKey, ShowKey
from tandem.cli.load import LoadCommand
from tandem.cli.plan import PlanCommand
from tandem.cli.quantize import QuantizeCommand
from tandem.cli.trace import TraceCommand
from tandem.cli.up import UpCommand
from tandem.cli.usage import UsageCommand
from tandem.planner_service.settings import PlannerSettings
from tandem.process.command import run_command

COMMANDS = [
    UpCommand,
    LoadCommand,
    TraceCommand,
    PlanCommand,
    QuantizeCommand,
    ConvertCommand,
    CreateKey,
    ListKeys,
    ShowKey,
    RevokeKey,
    UsageCommand,
    GenerateCommand,
    ChatCommand,
    PlannerSettings,
]
SAYS_SO = re.compile(r"omitted|default|unless|optional|required|always")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__)
def test_flags_without_a_value_say_what_is_done(command: type[BaseSettings]) -> None:
    silent = [
        name
        for name, field in command.model_fields.items()
        if field.default is None and not field.is_required() and not SAYS_SO.search(field.description or "")
    ]
    assert not silent


def test_help_names_no_types_of_python(capsys: pytest.CaptureFixture[str]) -> None:
    """It said `--port int` and `--accounts SecretStr`."""
    with pytest.raises(SystemExit):
        run_command(UpCommand, ["--help"])
    shown = capsys.readouterr().out
    assert "--port N " in shown
    assert "--accounts TEXT" in shown
    assert not re.findall(r"^  --\S+ (?:str|int|float|Path|SecretStr|list.*)\b", shown, re.MULTILINE)
