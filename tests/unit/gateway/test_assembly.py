"""A conversation becomes its model's tokens; what is asked of the answer goes along or is refused."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.core.errors import InvalidRequestError
from tandem.core.sampling_params import SamplingParams
from tandem.core.scope import UNSCOPED
from tandem.core.types import FinishReason
from tandem.gateway.assembly import Assembled, assemble
from tandem.gateway.conversation import (
    Breakpoint,
    Conversation,
    Effort,
    FormatKind,
    OutputFormat,
    Thinking,
    Tool,
    ToolChoice,
    ToolMode,
)
from tandem.gateway.dialect import DialectContext, RequestLimits
from tandem.gateway.errors import RequestError
from tandem.gateway.model import ServedModel
from tandem.gateway.parts import ContentText, Thought
from tandem.rpc.messages import ModelInfo
from tests.helpers.outputs import output_of
from tests.helpers.tokenizers import NUM_TOKENS, join_tokens, write_byte_tokenizer
from tests.unit.text.templates import CHATML

INFO = ModelInfo(name="m", fingerprint="f", max_model_len=4096, vocab_size=NUM_TOKENS, block_size=16)
USER = {"role": "user", "content": "hi"}
TOOL = Tool(name="look", description="looks", parameters={"type": "object", "properties": {"at": {"type": "string"}}})
SCHEMA = OutputFormat(FormatKind.JSON_SCHEMA, {"type": "object", "properties": {"a": {"type": "integer"}}})

Ask = Callable[..., Assembled]


@pytest.fixture
def thinker(tmp_path: Path) -> Ask:
    return asker(tmp_path, CHATML)


@pytest.fixture
def plain(tmp_path: Path) -> Ask:
    return asker(tmp_path, None)


def asker(directory: Path, template: str | None, *joined: tuple[str, str]) -> Ask:
    directory.mkdir(exist_ok=True)
    join_tokens(write_byte_tokenizer(directory), *joined)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    model = ServedModel.load(str(directory), "m", 0)
    around = DialectContext(model, None, RequestLimits(8, 8))  # type: ignore[arg-type]

    def ask(**fields: Any) -> Assembled:
        return asyncio.run(assemble(Conversation(**{"messages": [USER], **fields}), around, INFO, UNSCOPED))

    return ask


def test_a_plain_chat_is_what_the_template_says_and_its_tokens(plain: Ask) -> None:
    found = plain()
    assert found.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert found.token_ids.tolist() == found.model.tokenizer.encode(found.prompt, add_special_tokens=False)
    assert (found.grammar, found.reasoning, found.pins, found.skip_special_tokens) == (None, None, (), True)
    assert found.params(SamplingParams(seed=1)) == SamplingParams(seed=1)


def test_tools_are_described_as_templates_take_them(thinker: Ask) -> None:
    described = json.dumps(
        {"type": "function", "function": {"name": "look", "description": "looks", "parameters": TOOL.parameters}}
    )
    assert described in thinker(tools=(TOOL,)).prompt


def test_a_model_that_may_call_nothing_is_told_of_nothing(thinker: Ask) -> None:
    choice = ToolChoice(ToolMode.NONE)
    found = thinker(tools=(TOOL,), tool_choice=choice, breakpoints=(Breakpoint(300.0, tool=0),))
    assert "look" not in found.prompt
    assert found.grammar is None
    assert found.pins == ()


def test_a_required_call_is_a_grammar(thinker: Ask) -> None:
    assert thinker(tools=(TOOL,)).grammar is None
    grammar = thinker(tools=(TOOL,), tool_choice=ToolChoice(ToolMode.REQUIRED)).grammar
    assert grammar is not None
    assert "look" in grammar


def forced(ask: Ask) -> Assembled:
    """A call, without thinking before it."""
    return ask(tools=(TOOL,), tool_choice=ToolChoice(ToolMode.REQUIRED), thinking=Thinking(Effort.NONE))


@pytest.mark.parametrize("text", ["<tool", "<tool_call>", '<tool_call>\n{"name": "lo'])
def test_a_forced_call_that_was_cut_says_nothing(thinker: Ask, text: str) -> None:
    """Regression: the markup of a forced call that `max_tokens` cut was the answer's content."""
    result = forced(thinker).new_result(keep=True)
    result.add(result.read(output_of(0, (1,), text, finish_reason=FinishReason.LENGTH)))
    assert (result.text, result.calls) == ("", [])
    free = thinker(tools=(TOOL,), thinking=Thinking(Effort.NONE)).new_result(keep=True)
    free.add(free.read(output_of(0, (1,), text, finish_reason=FinishReason.LENGTH)))
    assert free.text == text, "what a free model wrote is kept"


def test_a_forced_call_cut_in_its_mark_is_the_call_alone(thinker: Ask) -> None:
    result = forced(thinker).new_result(keep=True)
    text = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call'
    result.add(result.read(output_of(0, (1,), text, finish_reason=FinishReason.LENGTH)))
    assert (result.text, [call.arguments for call in result.calls]) == ("", ['{"at": "x"}'])


UNCOMPILED: list[dict[str, Any]] = [
    {"properties": {"at": {"type": "str"}}},
    {"properties": {"at": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}},
    {"required": "at"},
]


@pytest.mark.parametrize("parameters", UNCOMPILED)
@pytest.mark.parametrize("choice", [ToolChoice(ToolMode.REQUIRED), ToolChoice(ToolMode.REQUIRED, ("look", "odd"))])
def test_a_schema_that_only_the_compiler_refuses_frees_its_own_tool(
    thinker: Ask, parameters: dict[str, Any], choice: ToolChoice
) -> None:
    """Regression: a forced call was refused for what one of the other tools' parameters say."""
    odd = Tool(name="odd", parameters=parameters)
    grammar = thinker(tools=(TOOL, odd), tool_choice=choice).grammar
    assert grammar == thinker(tools=(TOOL, replace(odd, parameters={"if": {}})), tool_choice=choice).grammar
    strict = replace(odd, strict=True)
    for mode in (ToolMode.REQUIRED, ToolMode.AUTO):
        with pytest.raises(InvalidRequestError, match="strict tool 'odd'"):
            thinker(tools=(TOOL, strict), tool_choice=ToolChoice(mode))


def test_tools_of_a_model_that_calls_none_are_refused(plain: Ask) -> None:
    with pytest.raises(RequestError, match="not known to call tools") as refusal:
        plain(tools=(TOOL,))
    assert refusal.value.param == "tools"


def test_a_format_begins_where_thinking_ends(thinker: Ask) -> None:
    """Whether the model thinks is settled before it answers: else it could not, or would escape the format."""
    found = thinker(output_format=SCHEMA)
    assert found.prompt.endswith("<|im_start|>assistant\n<think>\n")
    assert found.is_thinking_open
    assert found.reasoning is not None
    assert found.reasoning.is_open
    params = found.params(SamplingParams(seed=1))
    assert params.grammar == found.grammar is not None


def test_a_format_without_thinking_begins_at_once(thinker: Ask) -> None:
    found = thinker(output_format=SCHEMA, thinking=Thinking(Effort.NONE))
    assert found.prompt.endswith("<think>\n\n</think>\n\n")
    assert not found.is_thinking_open


FORCED = {"tools": (TOOL,), "tool_choice": ToolChoice(ToolMode.REQUIRED)}


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"output_format": SCHEMA}, "output format .*'</think>'.*reasoning_effort 'none'", "response_format"),
        (FORCED, "call .*reasoning_effort 'none'", "tool_choice"),
        ({"thinking": Thinking(Effort.LOW)}, "effort 'low'", "reasoning_effort"),
        ({"thinking": Thinking(Effort.LOW, 77)}, "budget of 77", "reasoning_effort"),
    ],
)
def test_what_needs_to_know_where_thinking_ends_is_refused_where_no_token_tells(
    tmp_path: Path, fields: dict[str, Any], message: str, param: str
) -> None:
    """Regression: the grammar never began, and the answer went on to its limit."""
    ask = asker(tmp_path, CHATML, (">", "Ċ"))
    with pytest.raises(RequestError, match=message) as refusal:
        ask(**fields)
    assert refusal.value.param == param
    off = ask(**{**fields, "thinking": Thinking(Effort.NONE)})
    assert (off.grammar is None, off.reasoning, off.is_thinking_open) == ("thinking" in fields, None, False)
    update = ask().new_result(keep=True).read(output_of(0, (), "<think>\nhm\n</think>\n\nyes"))
    assert list(update.parts) == [Thought("hm"), ContentText("yes")]


@pytest.mark.parametrize("thinking", [Thinking(), Thinking(Effort.NONE)])
def test_thinking_that_is_always_on_goes_with_no_format_where_no_token_tells_its_end(
    tmp_path: Path, thinking: Thinking
) -> None:
    ask = asker(tmp_path, "{{ messages[0].content }}{# </think> #}<think>\n", (">", "Ċ"))
    with pytest.raises(RequestError, match=r"leave it out$"):
        ask(output_format=SCHEMA, thinking=thinking)
    assert ask(thinking=Thinking(Effort.MAX)).is_thinking_open


@pytest.mark.parametrize(("thinking", "budget"), [(Thinking(Effort.LOW), 1024), (Thinking(Effort.LOW, 77), 77)])
def test_an_effort_is_a_budget_and_a_budget_goes_before_it(thinker: Ask, thinking: Thinking, budget: int) -> None:
    reasoning = thinker(thinking=thinking).reasoning
    assert reasoning is not None
    assert reasoning.max_tokens == budget


def test_an_effort_that_contradicts_the_template_is_refused(thinker: Ask) -> None:
    with pytest.raises(RequestError, match="contradict"):
        thinker(thinking=Thinking(Effort.HIGH), variables={"enable_thinking": False})


def test_the_answer_is_read_by_the_models_format(thinker: Ask) -> None:
    result = thinker().new_result(keep=True)
    update = result.read(output_of(0, (), "<think>\nhm\n</think>\n\nyes"))
    assert "".join(part.text for part in update.parts if isinstance(part, Thought)).strip() == "hm"
    assert "".join(part.text for part in update.parts if isinstance(part, ContentText)) == "yes"


def test_breakpoints_are_whole_tokens_before_their_place(plain: Ask) -> None:
    place = Breakpoint(300.0, message=0, offset=1)
    found = plain(breakpoints=(place, Breakpoint(3600.0, message=0, offset=2)))
    start = len(found.model.tokenizer.encode("<|im_start|>user\nh", add_special_tokens=False))
    assert [(pin.num_tokens, pin.ttl_s) for pin in found.pins] == [(start, 300.0), (start + 1, 3600.0)]


def test_a_continued_answer_ends_where_its_beginning_does(plain: Ask) -> None:
    messages = [USER, {"role": "assistant", "content": "Once upon"}]
    found = plain(messages=messages, is_continued=True)
    assert found.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nOnce upon"


def test_a_format_that_cannot_be_kept_is_refused(plain: Ask) -> None:
    with pytest.raises(InvalidRequestError):
        plain(output_format=OutputFormat(FormatKind.REGEX, "(unclosed"))


def test_options_that_do_not_go_with_a_format_are_refused(plain: Ask) -> None:
    found = plain(output_format=SCHEMA)
    with pytest.raises(InvalidRequestError, match="grammar"):
        found.params(SamplingParams(ignore_eos=True))


def test_documents_are_shown_or_refused(tmp_path: Path) -> None:
    """Regression: a template that knows none left them out of a prompt that was answered with a 200."""
    documents = ({"title": "t", "text": "the moon is blue"},)
    knows = asker(tmp_path / "knows", "{% for d in documents or [] %}{{ d.text }}{% endfor %}{{ messages[0].content }}")
    shown, bare = knows(documents=documents), knows()
    assert len(shown.token_ids) == len(bare.token_ids) + len("the moon is blue")
    with pytest.raises(RequestError, match="shows no documents") as refusal:
        asker(tmp_path / "knows-none", CHATML)(documents=documents)
    assert refusal.value.param == "documents"
