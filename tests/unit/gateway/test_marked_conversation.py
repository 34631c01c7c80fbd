"""The places of cache breakpoints are found in the prompt a template renders, whatever it does to its messages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.gateway.conversation import Breakpoint, Conversation, Tool
from tandem.gateway.marked_conversation import MarkedConversation
from tandem.text.chat_template import ChatTemplate

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
)
TRIMMED = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
NAMES = "{% for tool in tools %}{{ tool.name }}:{{ tool.description }} {% endfor %}{{ messages[0].content }}"
LAST_ONLY = "{{ messages[-1].content }}"


def places(source: str, conversation: Conversation) -> tuple[str, list[int]]:
    def render(of: Conversation) -> str:
        tools = [
            {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
            for tool in of.tools
        ]
        return ChatTemplate({"default": source}, {}).render(of.messages, tools=tools or None)

    prompt = render(conversation)
    marked = [MarkedConversation.of(conversation, point) for point in conversation.breakpoints]
    return prompt, [one.place(render(one.conversation), prompt) for one in marked]


def chat(*contents: str, points: tuple[Breakpoint, ...] = (), tools: tuple[Tool, ...] = ()) -> Conversation:
    messages = [{"role": "user", "content": content} for content in contents]
    return Conversation(messages=messages, breakpoints=points, tools=tools)


def test_each_place_is_the_text_before_it() -> None:
    points = (
        Breakpoint(1, message=0, offset=3),
        Breakpoint(1, message=0, offset=5),
        Breakpoint(1, message=1, offset=2),
    )
    prompt, found = places(PLAIN, chat("abcde", "fg", points=points))
    assert [prompt[:place] for place in found] == ["<user>abc", "<user>abcde", "<user>abcde</><user>fg"]


def test_trimmed_text_is_not_kept_beyond_what_is_shown() -> None:
    prompt, (place,) = places(TRIMMED, chat("  abc \n", points=(Breakpoint(1, message=0, offset=7),)))
    assert prompt[:place] == "<user>abc"


def test_a_place_that_is_not_shown_keeps_nothing() -> None:
    assert places(LAST_ONLY, chat("abc", "de", points=(Breakpoint(1, message=0, offset=3),)))[1] == [0]


@pytest.mark.parametrize("description", ["about it", None])
def test_a_place_among_the_tools_keeps_all_of_that_tool_that_the_template_shows(description: str | None) -> None:
    tools = (Tool(name="first", parameters={"a": 1}), Tool(name="second", description=description, parameters={"b": 2}))
    prompt, found = places(PLAIN, chat("x", points=(Breakpoint(1, tool=0), Breakpoint(1, tool=1)), tools=tools))
    first, second = (prompt[:place] for place in found)
    assert first.endswith('"parameters": {"a": 1')
    assert second.endswith('"parameters": {"b": 2')


def test_a_template_that_shows_less_of_a_tool_keeps_less() -> None:
    tools = (Tool(name="first", description="one"), Tool(name="second", description="two"))
    prompt, (place,) = places(NAMES, chat("x", points=(Breakpoint(1, tool=1),), tools=tools))
    assert prompt[:place] == "first:one second:two"


@given(st.lists(st.text(max_size=12), min_size=1, max_size=4), st.data())
def test_what_is_kept_is_a_prefix_of_the_prompt_up_to_the_place(contents: list[str], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(contents) - 1))
    offset = data.draw(st.integers(0, len(contents[index])))
    conversation = chat(*contents, points=(Breakpoint(1, message=index, offset=offset),))
    prompt, (place,) = places(PLAIN, conversation)
    before = "".join(f"<user>{content}</>" for content in contents[:index]) + f"<user>{contents[index][:offset]}"
    assert prompt[:place] == before
