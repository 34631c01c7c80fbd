"""Items as the messages that say the same, and what of them cannot be taken."""

from typing import Any

import pytest

from tandem.gateway.errors import RequestError
from tandem.gateway.openai.responses.ids import input_item_id, new_response_id, response_of
from tandem.gateway.openai.responses.items import read_items
from tandem.gateway.openai.responses.prompt import chat_messages

RESPONSE_ID = new_response_id()


def items(*given: Any) -> list[dict[str, Any]]:
    return read_items(list(given), RESPONSE_ID)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def call(call_id: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"}


def result(call_id: str, output: Any = "done") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def shape(*given: Any) -> list[str]:
    """Each message as its role and what it has."""
    found = []
    for _, message in chat_messages(items(*given)):
        has = [name for name in ("reasoning_content", "content", "tool_calls") if message.get(name)]
        found.append(f"{message['role']}:{'+'.join(has)}")
    return found


def test_a_turn_of_the_assistants_is_one_message() -> None:
    whole = [user("?"), thought("hm"), said("I look"), call("1"), call("2"), result("1"), result("2"), said("done")]
    assert shape(*whole) == [
        "user:content",
        "assistant:reasoning_content+content+tool_calls",
        "tool:content",
        "tool:content",
        "assistant:content",
    ]


def test_what_comes_before_its_place_begins_another_turn() -> None:
    assert shape(said("a"), said("b")) == ["assistant:content"] * 2
    assert shape(call("1"), said("b"), result("1")) == ["assistant:tool_calls", "assistant:content", "tool:content"]
    assert shape(thought("a"), thought("b"), said("c")) == [
        "assistant:reasoning_content",
        "assistant:reasoning_content+content",
    ]
    assert shape(said("a"), thought("b"), call("1")) == ["assistant:content", "assistant:reasoning_content+tool_calls"]


def test_a_text_is_a_message_of_the_users() -> None:
    (item,) = read_items("hi", RESPONSE_ID)
    assert item == {
        "id": input_item_id("msg", RESPONSE_ID, 0),
        "type": "message",
        "status": "completed",
        "role": "user",
        "content": [{"type": "input_text", "text": "hi"}],
    }
    assert response_of(item["id"]) == RESPONSE_ID
    assert response_of("msg_1") is response_of("msg_" + "0" * 48 + "_x") is None


def test_reading_items_again_changes_nothing() -> None:
    once = items(user("?"), thought("hm"), said("a"), call("1"), result("1", [{"type": "input_text", "text": "x"}]))
    assert read_items(once, new_response_id()) == once


WRONG: list[tuple[Any, str]] = [
    ({}, "input[0].type=None"),
    ({"type": "web_search_call", "id": "x"}, "input[0].type='web_search_call'"),
    ({"role": "tool", "content": "x"}, "input[0].role='tool'"),
    ({"role": "user"}, "input[0].content=None"),
    ({"role": "user", "content": []}, "input[0].content=[]"),
    ({"role": "user", "content": 3}, "input[0].content=3"),
    ({"role": "user", "content": ["x"]}, "input[0].content[0] is of type None"),
    ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "of type 'input_image'"),
    ({"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}, "of type 'input_file'"),
    ({"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}, "of type 'refusal'"),
    ({"role": "user", "content": [{"type": "input_text", "text": None}]}, "input[0].content[0].text=None"),
    ({"role": "user", "content": [{"type": "input_text", "text": "", "x": 1}]}, "input[0].content[0] has no 'x'"),
    ({"role": "user", "content": "x", "name": "me"}, "input[0].name='me'"),
    ({"role": "user", "content": "x", "id": ""}, "input[0].id=''"),
    ({"role": "user", "content": "x", "id": 3}, "input[0].id=3"),
    (call("1") | {"arguments": {}}, "input[0].arguments={}"),
    (call("1") | {"call_id": None}, "input[0].call_id=None"),
    (call("1") | {"namespace": "n"}, "input[0].namespace='n'"),
    (result("1", None), "input[0].output=None"),
    (result("1", [{"type": "input_image"}]), "input[0].output[0] is of type 'input_image'"),
    (thought("x") | {"encrypted_content": "abc"}, "input[0].encrypted_content is not of this server's making"),
    (thought("x") | {"content": "x"}, "input[0].content='x'"),
    (thought("x") | {"content": [{"type": "summary_text", "text": "x"}]}, "input[0].content[0]="),
    ({"type": "item_reference"}, "input[0].id=None"),
]


@pytest.mark.parametrize(("item", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_cannot_be_taken_is_refused_by_its_place(item: Any, message: str) -> None:
    with pytest.raises(RequestError) as refused:
        items(item)
    assert message in str(refused.value)
    assert refused.value.param == "input"


def test_an_output_needs_its_call() -> None:
    with pytest.raises(RequestError, match="no function_call with the call_id '2'"):
        list(chat_messages(items(call("1"), result("2"))))
    with pytest.raises(RequestError, match="no function_call with the call_id '1'"):
        list(chat_messages(items(result("1"), call("1"))))
