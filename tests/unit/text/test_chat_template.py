"""Rendered prompts equal transformers' and refusals carry the template's own words."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tandem.core.errors import CorruptCheckpointError, InvalidRequestError, UnsupportedCheckpointError
from tandem.text.chat_template import MAX_PROMPT_CHARACTERS, ChatTemplate
from tests.unit.text import checkpoints, templates, turn_templates

SYSTEM = {"role": "system", "content": " Be <brief> & kind. "}
USER = {"role": "user", "content": "Grüße! What's the weather in 東京? 🙂 {{ 7 * 7 }}"}
ANSWER = {"role": "assistant", "content": "Fine.\n", "tool_calls": None, "name": None}
THOUGHT = {"role": "assistant", "content": "Fine.", "reasoning": "\nthinking <hard>\n"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "id": "c1", "function": {"name": "weather", "arguments": {"city": "東京", "days": 2}}}
    ],
}
RESULT = {"role": "tool", "content": '{"celsius": 21.5}', "tool_call_id": "c1"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "look: "}, {"type": "image"}]}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a <city> & more 'quotes'",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CHATS: dict[str, list[dict[str, Any]]] = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "only_system": [SYSTEM],
    "turns": [SYSTEM, USER, ANSWER, USER],
    "answered": [USER, ANSWER],
    "thought": [USER, THOUGHT],
    "called": [USER, CALL, RESULT],
    "parts": [PARTS],
    "wrong_order": [USER, USER],
    "two_calls": [USER, {**CALL, "tool_calls": CALL["tool_calls"] * 2}],  # type: ignore[operator]
}
SHAPES = {
    "chatml": templates.CHATML,
    "headers": templates.HEADERS,
    "instructions": templates.INSTRUCTIONS,
    "turns": templates.TURNS,
    "last question": turn_templates.LAST_QUESTION,
    "macros": turn_templates.MACROS,
    "carried": turn_templates.CARRIED,
    "lookahead": turn_templates.LOOKAHEAD,
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": True},
    {"tools": [TOOL, TOOL], "add_generation_prompt": True},
    {"tools": []},
    {"documents": [{"title": "a", "text": "b"}]},
    {"enable_thinking": False, "date_string": "1 May", "bos_token": "<B>", "add_generation_prompt": True},
]


def _write(directory: Path, template: Any) -> Path:
    return checkpoints.byte_level(directory, {"chat_template": template, "pad_token": "<|user|>"})


@pytest.fixture(scope="module", params=list(SHAPES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ChatTemplate, Any]:
    directory = _write(tmp_path_factory.mktemp("checkpoint"), SHAPES[request.param])
    return ChatTemplate.load(directory), PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)


@pytest.mark.parametrize("chat", list(CHATS))
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_equals_transformers(pair: tuple[ChatTemplate, Any], chat: str, options: dict[str, Any]) -> None:
    ours, theirs = pair
    messages = CHATS[chat]
    expected, refusal = _theirs(theirs, messages, options)
    if refusal is None:
        assert ours.render(messages, **{"add_generation_prompt": False, **options}) == expected
    else:
        with pytest.raises(InvalidRequestError) as caught:
            ours.render(messages, **{"add_generation_prompt": False, **options})
        assert refusal in str(caught.value)


def _theirs(tokenizer: Any, messages: Any, options: dict[str, Any]) -> tuple[str | None, str | None]:
    """The prompt, or the words it was refused with."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options), None
    except Exception as refusal:
        return None, str(refusal)


def test_the_shapes_render_most_chats(pair: tuple[ChatTemplate, Any]) -> None:
    """Guards the comparison above against comparing refusals only."""
    for chat in ("user", "system", "turns", "answered"):
        assert len(pair[0].render(CHATS[chat])) > 30


def _template(source: str, **tokens: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, tokens, now=lambda: datetime(2031, 5, 6))


def test_the_generation_prompt_is_added_unless_declined() -> None:
    template = _template("{% if add_generation_prompt %}go{% endif %}")
    assert template.render([USER]) == "go"
    assert template.render([USER], add_generation_prompt=False) == ""


def test_the_clock_is_an_argument() -> None:
    assert _template("{{ strftime_now('%Y-%m-%d') }}").render([USER]) == "2031-05-06"


def test_json_is_not_escaped_for_html() -> None:
    assert _template("{{ messages[0] | tojson }}").render([{"content": "<é'>"}]) == '{"content": "<é\'>"}'


def test_the_messages_of_the_caller_are_not_changed() -> None:
    messages = [{"role": "user", "content": None, "thinking": "x"}]
    before = json.dumps(messages)
    _template("{{ messages }}").render(messages)
    assert json.dumps(messages) == before


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('no system role, please') }}", "no system role, please"),
        ("{{ messages[5].content.strip() }}", "undefined|no element"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ none | tojson(indent={}) }}{{ undefined_thing() }}", "."),
        ("{{ namespace | tojson }}", "JSON serializable"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "[Rr]ange too big"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{% include 'other' %}", "loader"),
    ],
)
def test_what_a_template_refuses_is_the_requests_fault(source: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        _template(source).render([USER])


def test_an_endless_prompt_is_cut_off() -> None:
    source = "{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}"
    with pytest.raises(InvalidRequestError, match=f"exceeds {MAX_PROMPT_CHARACTERS}"):
        _template(source).render([{"content": "x" * 1000}])


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([], {}, "empty"),
        (["hi"], {}, "must be an object"),
        ([USER], {"tools": [print]}, "must be JSON"),
        ([{"content": b"bytes"}], {}, "must be JSON"),
        ([USER], {"messages": []}, "may not be named"),
    ],
)
def test_requests_that_are_not_chats_are_refused(messages: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        _template("{{ messages }}").render(messages, **options)


def test_deeply_nested_data_is_refused() -> None:
    nested: Any = "x"
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(InvalidRequestError, match="nested"):
        _template("").render([{"content": nested}])


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with {{ tools | length }}"}]
    template = ChatTemplate.load(_write(tmp_path, named))
    assert template.render([USER]) == "plain"
    assert template.render([USER], tools=[TOOL]) == "with 1"


def test_a_template_without_a_default_says_what_there_is(tmp_path: Path) -> None:
    template = ChatTemplate.load(_write(tmp_path, [{"name": "rag", "template": "x"}]))
    with pytest.raises(InvalidRequestError, match=r"\['rag'\]"):
        template.render([USER])


def test_template_files_replace_the_configured_template(tmp_path: Path) -> None:
    directory = _write(tmp_path, "configured")
    (directory / "chat_template.jinja").write_text("from a file {{ eos_token }}", encoding="utf-8")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("tools", encoding="utf-8")
    template = ChatTemplate.load(directory)
    assert template.render([USER]) == "from a file <|end|>"
    assert template.render([USER], tools=[TOOL]) == "tools"


def test_named_templates_are_read_where_transformers_saves_them(tmp_path: Path) -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(_write(tmp_path / "tokenizer", None))
    theirs.chat_template = {"default": "plain", "tool_use": "with {{ tools | length }}"}
    theirs.save_pretrained(tmp_path / "saved")
    template = ChatTemplate.load(tmp_path / "saved")
    for tools in (None, [TOOL]):
        expected = theirs.apply_chat_template([USER], tools=tools, tokenize=False)
        assert template.render([USER], tools=tools) == expected


@pytest.mark.parametrize(
    "config",
    [
        {"image_token": "<|user|>", "eot_token": "<|end|>"},
        {"image_token": {"__type": "AddedToken", "content": "<|user|>"}, "add_bos_token": True},
        {"extra_special_tokens": {"image_token": "<|user|>", "turn": "<|begin|>"}, "eot_token": "<tool>"},
        {"additional_special_tokens": {"image_token": "<tool>"}, "image_token": "<|user|>"},
        {"extra_special_tokens": ["<|user|>"], "eot_token": None},
    ],
    ids=str,
)
def test_a_models_own_tokens_have_names_in_templates(config: dict[str, Any], tmp_path: Path) -> None:
    """Regression: names that are not common to all models were undefined, so prompts silently lacked these tokens."""
    source = "{{ bos_token }},{{ image_token }},{{ eot_token }},{{ turn }},{{ add_bos_token }}"
    directory = checkpoints.byte_level(tmp_path, {"chat_template": source, **config})
    theirs = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    assert ChatTemplate.load(directory).render([USER]) == theirs.apply_chat_template([USER], tokenize=False)


def test_a_template_of_a_multimodal_checkpoint_is_found(tmp_path: Path) -> None:
    """Regression: Mistral Small 3.1, whose only template is in this file, took no conversations."""
    file = checkpoints.byte_level(tmp_path) / "chat_template.json"
    file.write_text(json.dumps({"chat_template": "of the processor"}))
    assert ChatTemplate.load(tmp_path).render([USER]) == "of the processor"
    assert ChatTemplate.load(_write(tmp_path, "of the tokenizer")).render([USER]) == "of the tokenizer"
    _write(tmp_path, None)
    file.write_text('{"chat_template": 5}')
    with pytest.raises(CorruptCheckpointError, match=r"chat_template\.json: chat_template is no template: 5"):
        ChatTemplate.load(tmp_path)


def test_a_base_model_has_no_template(tmp_path: Path) -> None:
    directory = checkpoints.byte_level(tmp_path)
    assert ChatTemplate.find(directory) is None
    with pytest.raises(UnsupportedCheckpointError, match=r"chat_template\.jinja"):
        ChatTemplate.load(directory)


ONLY_PYTHON_FINDS = ["{% break %}", "{{ f(a=1, a=2) }}", "{{ " + "9" * 5000 + " }}"]  # regression: no refusal by name


@pytest.mark.parametrize(
    "template",
    ["{% if %}", "{% nonsense %}", "{{ x", 5, [1], [{"name": "default"}], *ONLY_PYTHON_FINDS],
    ids=lambda template: str(template)[:20],
)
def test_a_damaged_template_is_corrupt(template: Any, tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpointError, match="template"):
        ChatTemplate.load(_write(tmp_path, template))
