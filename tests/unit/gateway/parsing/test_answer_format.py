"""A model's form is seen from its template, and what its template writes of earlier answers is read back the same."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.core.errors import ConfigurationError
from tandem.core.reasoning import ReasoningState
from tandem.gateway.conversation import Effort, ToolChoice, ToolMode
from tandem.gateway.parsing.answer_format import AnswerFormat
from tandem.gateway.parsing.effort import BUDGETS
from tandem.gateway.parts import PlainParser
from tandem.text.chat_template import ChatTemplate
from tandem.text.tokenizer import Tokenizer
from tests.helpers.tokenizers import CHAT_TEMPLATE, join_tokens
from tests.unit.gateway.parsing import shapes
from tests.unit.gateway.parsing.reading import TOOLS, Reading, read
from tests.unit.gateway.parsing.walking import byte_tokenizer
from tests.unit.text import templates

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": "Weather? <think> [TOOL_CALLS] <tool_call>"}
ARGUMENTS = {"city": "東京 \"{'", "days": 2, "list": [1.5, {"a": "\n"}]}
CALL = {"type": "function", "id": "abcdefgh9", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
RESULT = {"role": "tool", "content": "21", "tool_call_id": "abcdefgh9"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def detect(template: str | None, tokenizer: Tokenizer, **overrides: Any) -> AnswerFormat:
    return AnswerFormat.detect(template, tokenizer, **overrides)


def said_form(template: str | None, tokenizer: Tokenizer, **overrides: str) -> tuple[Any, ...]:
    form = detect(template, tokenizer, **overrides)
    thinking = form.thinking
    return (
        None if form.tools is None else form.tools.name,
        None if thinking is None else (thinking.start, thinking.variable, thinking.is_default),
        form.needs_special_tokens,
    )


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (None, (None, None, False)),
        (CHAT_TEMPLATE, (None, None, False)),
        (templates.TURNS, (None, None, False)),
        (templates.CHATML, ("hermes", ("<think>", "enable_thinking", True), False)),
        (templates.HEADERS, ("llama3_json", None, True)),
        (templates.INSTRUCTIONS, ("mistral", None, True)),
        (shapes.QWEN, ("hermes", ("<think>", "enable_thinking", True), False)),
        (shapes.OPENING, ("hermes", ("<think>", None, True), False)),
        (shapes.HYBRID, (None, ("<think>", "thinking", False), False)),
        (shapes.NAMED, ("mistral", ("[THINK]", None, True), True)),
        (shapes.PYTHONIC, ("llama_pythonic", None, False)),
        (shapes.QWEN.replace('{"name"', "<function=name>"), (None, ("<think>", "enable_thinking", True), False)),
        ("{{ messages[0].content }}{# enable_thinking #}", (None, ("[THINK]", None, True), True)),
        ("{{ broken", (None, None, False)),
    ],
)
def test_detection(template: str | None, form: tuple[Any, ...], tokenizer: Tokenizer) -> None:
    assert said_form(template, tokenizer) == form


def test_overrides(tokenizer: Tokenizer) -> None:
    assert said_form(shapes.QWEN, tokenizer, tool_parser="none", reasoning_parser="none") == (None, None, False)
    assert said_form(None, tokenizer, tool_parser="mistral")[0] == "mistral"
    assert said_form(None, tokenizer, reasoning_parser="mistral")[1] == ("[THINK]", None, True)
    custom = detect(None, tokenizer, reasoning_parser=" <a>, </a> ").thinking
    assert custom is not None
    assert (custom.start, custom.end) == ("<a>", "</a>")


@pytest.mark.parametrize("name", ["hermez", "", "a,"])
def test_unknown_names_are_refused_with_the_known_ones(name: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigurationError, match="auto, none, hermes, llama3_json, llama_pythonic, mistral"):
        detect(None, tokenizer, tool_parser=name)
    with pytest.raises(ConfigurationError, match="auto, none, think, mistral"):
        detect(None, tokenizer, reasoning_parser=name)
    with pytest.raises(ConfigurationError, match="64 tokens"):
        detect(None, tokenizer, reasoning_parser=f"<a>,{'b' * 65}")


def rendered(template: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    return ChatTemplate({"default": template}, TOKENS).render(messages, **variables)


TOOL_SPECS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
ANSWERS: dict[str, tuple[str, str, list[dict[str, Any]], str]] = {
    "qwen": (shapes.QWEN, "Let me see.", [CALL, CALL], "So.\n\nWell."),
    "qwen_only_calls": (shapes.QWEN, "", [CALL], ""),
    "qwen_only_text": (shapes.QWEN, "Fine.", [], "Hm."),
    "chatml": (templates.CHATML, "", [CALL, CALL], ""),
    "llama": (shapes.LLAMA, "", [CALL], ""),
    "mistral": (shapes.LISTED, "", [CALL, CALL], ""),
    "mistral_named": (shapes.NAMED, "Let me see.", [CALL, CALL], "Hm."),
    "pythonic": (shapes.PYTHONIC, "", [CALL, CALL], ""),
}
BEGINNINGS = ("assistant<|end_header_id|>\n\n", "assistant<|header_end|>\n\n", "<|im_start|>assistant\n", "[/INST]")
ENDS = ("<|im_end|>", "<|eot_id|>", "<|eot|>", "</s>")


def last_answer(prompt: str) -> str:
    """Answer that a model would have had to write, taken from a template's rendering of it."""
    for beginning in BEGINNINGS:
        prompt = prompt.rpartition(beginning)[2]
    return min((prompt.partition(end)[0] for end in ENDS), key=len)


@pytest.mark.parametrize("name", list(ANSWERS))
def test_what_a_template_writes_is_read_back(name: str, tokenizer: Tokenizer) -> None:
    template, content, calls, thought = ANSWERS[name]
    answer: dict[str, Any] = {"role": "assistant", "content": content}
    answer |= {"tool_calls": calls} if calls else {}
    answer |= {"reasoning_content": thought} if thought else {}
    rest = {"tools": TOOL_SPECS, "date_string": "today", "add_generation_prompt": False}
    text = last_answer(rendered(template, [USER, answer], **rest))
    form = detect(template, tokenizer)
    for pieces in ([text], list(text)):
        found = read(form.parser(tools=TOOLS, is_thinking_open=False), pieces)
        again = {**answer, "content": found.said, "tool_calls": _as_messages(found), "reasoning_content": found.thought}
        assert (found.said, found.thought, len(found.calls)) == (content, thought, len(calls))
        again = {key: value for key, value in again.items() if value or key == "content"}
        assert rendered(template, [USER, again], **rest) == rendered(template, [USER, answer], **rest)
        if calls and name != "chatml":
            rendered(template, [USER, answer, RESULT], **rest)


def _as_messages(found: Reading) -> list[dict[str, Any]]:
    return [{**CALL, "function": {"name": name, "arguments": json.loads(arguments)}} for name, arguments in found.calls]


@pytest.mark.parametrize(
    ("template", "variables", "is_open"),
    [
        (shapes.QWEN, {}, False),
        (shapes.QWEN, {"enable_thinking": False}, False),
        (shapes.OPENING, {}, True),
        (shapes.HYBRID, {}, False),
        (shapes.HYBRID, {"thinking": True}, True),
    ],
)
def test_whether_the_prompt_opens_thinking(
    template: str, variables: dict[str, Any], is_open: bool, tokenizer: Tokenizer
) -> None:
    thinking = detect(template, tokenizer).thinking
    assert thinking is not None
    assert thinking.is_open(rendered(template, [USER], add_generation_prompt=True, **variables)) is is_open


def test_marks_as_tokens(tokenizer: Tokenizer) -> None:
    """One token where the vocabulary has one, else as it is spelled; the state follows both."""
    special = detect(shapes.NAMED, tokenizer).reasoning(tokenizer, is_open=False, budget=7)
    assert special is not None
    assert special.start_token_ids == (tokenizer.token_id("[THINK]"),)
    assert special.max_tokens == 7
    spelled = detect(shapes.QWEN, tokenizer).reasoning(tokenizer, is_open=True, budget=None)
    assert spelled is not None
    state = ReasoningState(spelled)
    for token_id in tokenizer.encode("Hm.</think>", add_special_tokens=False):
        assert state.is_thinking
        state.observe(token_id)
    assert state.is_over
    assert state.num_tokens == 3
    assert AnswerFormat().reasoning(tokenizer, is_open=False, budget=7) is None


def test_marks_that_join_with_what_stands_beside_them(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Regression: models write `>` and line breaks as one token, so the end that was waited for never came."""
    byte_tokenizer(tmp_path)
    join_tokens(tmp_path, (">", "Ċ"), (">Ċ", "Ċ"))
    joining = Tokenizer.load(tmp_path)
    assert len(joining.encode("</think>\n\nHi")) == len("</think>Hi")
    for template, parser in ((shapes.QWEN, "auto"), (None, "<think>,</think>")):
        form = detect(template, joining, reasoning_parser=parser)
        assert form.thinking is not None
        assert not form.thinking.has_fixed_tokens
        assert form.reasoning(joining, is_open=True, budget=None) is None
        found = read(form.parser(tools=(), is_thinking_open=True), ["Hm.\n</think>\n\nHi"])
        assert (found.thought, found.said) == ("Hm.", "Hi")
    for template, vocabulary in ((shapes.QWEN, tokenizer), (shapes.NAMED, joining)):
        thinking = detect(template, vocabulary).thinking
        assert thinking is not None
        assert thinking.has_fixed_tokens


def test_budgets(tokenizer: Tokenizer) -> None:
    assert list(BUDGETS) == list(Effort)
    assert [BUDGETS[effort] for effort in Effort] == [0, 512, 1024, 4096, 16384, 32768, None]
    ours = {**BUDGETS, Effort.LOW: 5}
    thinking = AnswerFormat.detect(shapes.QWEN, tokenizer, budgets=ours).thinking
    assert thinking is not None
    assert thinking.budgets[Effort.LOW] == 5


def test_a_model_of_neither(tokenizer: Tokenizer) -> None:
    form = AnswerFormat()
    assert isinstance(form.parser(tools=TOOLS, is_thinking_open=False), PlainParser)
    assert isinstance(detect(templates.INSTRUCTIONS, tokenizer).parser(tools=(), is_thinking_open=False), PlainParser)
    assert form.grammar(TOOLS, ToolChoice(ToolMode.NONE), None) is None
