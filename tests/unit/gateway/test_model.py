"""Templates that have much to walk are rendered where they hold up nobody."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.core.errors import ConfigurationError
from tandem.gateway.model import ServedModel
from tandem.text.chat_template import ChatTemplate
from tests.helpers.fake_backend import MODEL
from tests.helpers.tokenizers import CHAT_TEMPLATE, write_byte_tokenizer
from tests.unit.gateway.anthropic.talking import Scene, play

SAID = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [0] * 50_000}}}
FUNCTION = {"name": "f", "parameters": SCHEMA}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, 2, 3]}'}}
CALLED = [*SAID, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c", "content": "x"}]
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": SAID, "tools": [{"type": "function", "function": FUNCTION}]}),
    "messages": (
        "/v1/messages",
        {"messages": SAID, "max_tokens": 8, "tools": [{"name": "f", "input_schema": SCHEMA}]},
    ),
    "responses": ("/v1/responses", {"input": "hi", "tools": [{"type": "function", **FUNCTION}]}),
    "tokens": ("/tokenize", {"messages": SAID, "tools": [{"type": "function", "function": FUNCTION}]}),
    "calls": ("/v1/chat/completions", {"messages": CALLED}),
    "variables": ("/v1/chat/completions", {"messages": SAID, "chat_template_kwargs": {"x": [0]}}),
    "long": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 100_000}]}),
    "many": ("/v1/chat/completions", {"messages": SAID * 40}),
}


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """Threads in which templates were rendered."""
    found: list[threading.Thread] = []

    def note(render: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **variables: Any) -> Any:
            found.append(threading.current_thread())
            return render(*arguments, **variables)

        return noted

    for name in ("render", "render_from"):
        monkeypatch.setattr(ChatTemplate, name, note(getattr(ChatTemplate, name)))
    return found


@pytest.mark.parametrize("name", ASKED)
def test_much_is_rendered_apart(tmp_path: Path, name: str, threads: list[threading.Thread]) -> None:
    """Few messages with large tools were rendered in the event loop, for seconds."""
    path, asked = ASKED[name]

    async def story(scene: Scene) -> None:
        threads.clear()  # NOTE: of finding out how the template writes thinking
        answer: httpx.Response = await scene.client.post(path, json={"model": MODEL, **asked})
        assert answer.status_code in (200, 400), answer.text
        assert threads
        assert threading.current_thread() not in threads

    play(tmp_path, story, "ok")


def test_little_is_not(tmp_path: Path, threads: list[threading.Thread]) -> None:
    async def story(scene: Scene) -> None:
        threads.clear()  # NOTE: of finding out how the template writes thinking
        asked = {"model": MODEL, "messages": SAID}
        assert (await scene.client.post("/v1/chat/completions", json=asked)).status_code == 200
        assert threads == [threading.current_thread()]

    play(tmp_path, story, "ok")


SHOWS_TOOLS = CHAT_TEMPLATE + "{% if tools %}{{ tools | tojson }}{% endif %}"


def test_calls_are_not_read_of_a_model_that_sees_no_tools(tmp_path: Path) -> None:
    """Regression: tools were accepted and the model never saw them."""
    write_byte_tokenizer(tmp_path)
    template = tmp_path / "chat_template.jinja"
    template.write_text(CHAT_TEMPLATE)
    with pytest.raises(ConfigurationError, match=r"tool_parser=hermes: the chat template of .* shows no tools"):
        ServedModel.load(str(tmp_path), "m", 0, tool_parser="hermes")
    template.write_text(CHAT_TEMPLATE + "{# <tool_call> #}")
    assert ServedModel.load(str(tmp_path), "m", 0).answers.tools is None
    template.write_text(SHOWS_TOOLS)
    answers = ServedModel.load(str(tmp_path), "m", 0, tool_parser="hermes").answers
    assert answers.tools is not None
    assert answers.tools.name == "hermes"
