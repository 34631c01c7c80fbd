"""Templates that allow one system message are given one, and nothing that was said is lost."""

from pathlib import Path
from typing import Any

import pytest

from tandem.gateway.conversation import Breakpoint, Conversation
from tandem.gateway.one_system import shows_later_systems, with_one_system
from tests.helpers.fake_backend import MODEL
from tests.unit.gateway.anthropic.talking import TEMPLATE, Scene, play

ALTERNATING = """
{%- if messages[0].role == 'system' %}{{- '<sys>' + messages[0].content }}{% set rest = messages[1:] %}
{%- else %}{% set rest = messages %}{% endif %}
{%- for message in rest %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<' + message.role + '>' + message.content }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<assistant>' }}{% endif %}
"""
DROPPING = """
{%- for message in messages %}
{%- if message.role != 'system' or loop.first %}{{- '<' + message.role + '>' + message.content }}{% endif %}
{%- endfor %}
"""
SAID = [("system", "a"), ("developer", "b"), ("user", "c"), ("assistant", "d"), ("system", "e"), ("user", "f")]


def messages(said: list[tuple[str, str]]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in said]


@pytest.mark.parametrize(("template", "is_shown"), [(TEMPLATE, True), (ALTERNATING, False), (DROPPING, False)])
def test_whether_a_later_one_is_shown_is_found_out(template: str, is_shown: bool) -> None:
    assert shows_later_systems(template) is is_shown


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_a_template_that_allows_one_gets_one(path: str, tmp_path: Path) -> None:
    """The template refused the conversation: 400."""

    async def story(scene: Scene) -> None:
        said = {"input" if path == "responses" else "messages": messages(SAID)}
        response = await scene.client.post(f"/v1/{path}", json={"model": MODEL, **said})
        assert response.status_code == 200, response.text
        assert scene.worker.last_prompt.replace("\n\n", "|") == "<sys>a|b<user>c<assistant>d<user>e|f<assistant>"

    play(tmp_path, story, "ok", template=ALTERNATING)


def test_breakpoints_stay_at_their_places() -> None:
    said = messages([("system", "ab"), ("system", "cd"), ("user", "ef"), ("system", "gh"), ("user", "ij")])
    points = tuple(Breakpoint(60.0, message=number, offset=1) for number in range(5))
    asked = with_one_system(Conversation(messages=said, breakpoints=(Breakpoint(60.0, tool=0), *points)))
    assert asked.messages == messages([("system", "ab\n\ncd"), ("user", "ef\n\ngh\n\nij")])
    tool, *rest = asked.breakpoints
    assert (tool.tool, tool.message) == (0, None)
    marked = [asked.messages[point.message or 0]["content"][point.offset] for point in rest]
    assert marked == list("bdfhj")


def test_messages_that_are_nobodys_system_are_left_alone() -> None:
    said = messages([("user", "a"), ("user", "b"), ("assistant", "c"), ("system", "d")])
    asked = with_one_system(Conversation(messages=said))
    assert asked.messages == messages([("user", "a"), ("user", "b"), ("assistant", "c"), ("user", "d")])
