"""The help of each command says what happens where a flag is left out."""

import re

import pytest
from pydantic_settings import BaseSettings

from tandem.cli.chat import Chat
from tandem.cli.generate import Generate
from tandem.cli.keys import CreateKey, ListKeys, RevokeKey, ShowKey
from tandem.cli.load import Load
from tandem.cli.plan import Plan
from tandem.cli.trace import Trace
from tandem.cli.up import Up
from tandem.cli.usage import Usage
from tandem.scaling.settings import PlannerSettings

COMMANDS = [Up, Load, Trace, Plan, CreateKey, ListKeys, ShowKey, RevokeKey, Usage, Generate, Chat, PlannerSettings]
SAYS_SO = re.compile(r"omitted|default|unless|optional|required|always")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__)
def test_flags_without_a_value_say_what_is_done(command: type[BaseSettings]) -> None:
    silent = [
        name
        for name, field in command.model_fields.items()
        if field.default is None and not field.is_required() and not SAYS_SO.search(field.description or "")
    ]
    assert not silent
