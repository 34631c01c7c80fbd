"""`tandem chat` prints what it was told as it is, not as markup."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tandem.cli.chat import ChatCommand
from tandem.core.errors import InvalidRequestError
from tandem.core.sampling_params import SamplingParams

REFUSAL = "the template wants [INST] and [/INST] in turns"


class RefusingTemplate:
    """Refuses every conversation."""

    def render(self, messages: Any) -> str:
        raise InvalidRequestError(REFUSAL)


def test_a_refusal_with_brackets_ends_no_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended the command with a traceback of rich, which took them for the end of a style."""
    shown = io.StringIO()
    lines = iter(["hello", "/quit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    monkeypatch.setattr("tandem.cli.chat.Console", lambda **_: Console(file=shown, highlight=False, width=200))
    monkeypatch.setattr("tandem.cli.chat.resolve_model_path", lambda *_, **__: Path("m"))
    engine = SimpleNamespace(tokenizer=SimpleNamespace(encode=list), sampling_defaults={})
    monkeypatch.setattr("tandem.cli.chat.build_engine", lambda _: engine)
    monkeypatch.setattr("tandem.cli.chat.ChatTemplate", SimpleNamespace(load=lambda _: RefusingTemplate()))
    monkeypatch.setattr(ChatCommand, "sampling_params", lambda *_: SamplingParams())
    assert ChatCommand.model_validate({"model": "models/[new]"}).run() == 0
    assert "models/[new] is ready" in shown.getvalue()
    assert REFUSAL in shown.getvalue()


def test_a_conversation_has_one_answer() -> None:
    """The pieces of two were printed as one text, which became the assistant's message."""
    with pytest.raises(InvalidRequestError, match="n=2"):
        ChatCommand.model_validate({"model": "m", "n": 2}).run()
