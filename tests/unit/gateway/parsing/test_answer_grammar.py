"""Everything a grammar admits is read back by the family's parser as calls that keep to their schemas."""

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from tandem.core.errors import InvalidRequestError
from tandem.gateway.conversation import FormatKind, OutputFormat, Tool, ToolChoice, ToolMode
from tandem.gateway.parsing.answer_format import AnswerFormat
from tandem.gateway.parsing.tool_formats import NAMES
from tandem.text.grammars import Grammars
from tandem.text.tokenizer import Tokenizer
from tests.unit.gateway.parsing import shapes
from tests.unit.gateway.parsing.reading import Reading, read
from tests.unit.gateway.parsing.walking import SPECIAL, Walker, byte_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 0, "maximum": 20},
        "is_exact": {"type": "boolean"},
        "unit": {"enum": ["C", "F"]},
        "spots": {"type": "array", "items": {"$ref": "#/$defs/spot"}, "maxItems": 2},
    },
    "$defs": {"spot": {"type": "object", "properties": {"x": {"type": "null"}}, "additionalProperties": False}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
STRICT = Tool(name="weather", parameters=SCHEMA, strict=True)
LOOSE = Tool(name="loose", parameters={"properties": {"n": {"type": "integer", "format": "zzz"}}, "required": ["n"]})
EMPTY = Tool(name="now", strict=True)
SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": SCHEMA,
    "loose": {"type": "object"},
    "now": {"type": "object", "maxProperties": 0},
}
TOOLS = (STRICT, LOOSE, EMPTY)
TEMPLATES = {"mistral": "", "named": "[TOOL_CALLS] [ARGS]", "ids": "[TOOL_CALLS] [CALL_ID] [ARGS]"}
FORMATS = [*NAMES, "named", "ids"]
OUTPUT = OutputFormat(
    FormatKind.JSON_SCHEMA,
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
)


@pytest.fixture(scope="module", params=["special", "spelled"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    special = SPECIAL if request.param == "special" else ("<unused>",)
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), special)


@pytest.fixture(scope="module")
def walker(tokenizer: Tokenizer) -> Iterator[Walker]:
    eos = tokenizer.eos_token_id
    assert eos is not None
    grammars = Grammars(tokenizer, tokenizer.vocab_size, (eos,))
    yield Walker(tokenizer, grammars)
    grammars.close()


def form_of(name: str, tokenizer: Tokenizer, reasoning: str = "none") -> AnswerFormat:
    parser = "mistral" if name in TEMPLATES else name
    return AnswerFormat.detect(TEMPLATES.get(name), tokenizer, tool_parser=parser, reasoning_parser=reasoning)


def readings(
    form: AnswerFormat, walker: Walker, grammar: str | None, num_answers: int = 12
) -> Iterator[tuple[str, Reading]]:
    assert grammar is not None
    for seed in range(num_answers):
        text = walker.answer(grammar, random.Random(seed))
        found = read(form.parser(tools=TOOLS, is_thinking_open=False), [text])
        for name, arguments in found.calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
        yield text, found


@pytest.mark.parametrize("name", FORMATS)
def test_required(name: str, tokenizer: Tokenizer, walker: Walker) -> None:
    form = form_of(name, tokenizer)
    called: set[str] = set()
    for text, found in readings(form, walker, form.grammar(TOOLS, ToolChoice(ToolMode.REQUIRED), None)):
        assert found.calls, text
        assert not found.said, text
        called.update(tool for tool, _ in found.calls)
        assert all("n" in json.loads(arguments) for tool, arguments in found.calls if tool == "loose")
    assert len(called) > 1


@pytest.mark.parametrize("name", FORMATS)
def test_one_of_some(name: str, tokenizer: Tokenizer, walker: Walker) -> None:
    form = form_of(name, tokenizer)
    choice = ToolChoice(ToolMode.REQUIRED, ("weather",), is_parallel=False)
    for text, found in readings(form, walker, form.grammar(TOOLS, choice, OUTPUT)):
        assert [tool for tool, _ in found.calls] == ["weather"], text
        assert not found.said, text


@pytest.mark.parametrize("name", FORMATS)
def test_auto(name: str, tokenizer: Tokenizer, walker: Walker) -> None:
    """Text is free, what begins a call must go on as one."""
    form = form_of(name, tokenizer)
    grammar = form.grammar(TOOLS, ToolChoice(is_parallel=False), None)
    assert grammar is not None
    for text, found in readings(form, walker, grammar, 20):
        assert len(found.calls) <= 1, text
        assert found.calls or found.said == text
    assert walker.admits(grammar, "")
    assert walker.admits(grammar, "Just <text>, no {call}.\n")
    for call in (CALLS[name].replace("weather", "other"), CALLS[name].replace('C"', 'K"')):
        assert not walker.admits(grammar, call), call
    assert walker.admits(grammar, CALLS[name])
    assert not walker.admits(grammar, CALLS[name] * 2)


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_or_an_answer_of_a_form(name: str, tokenizer: Tokenizer, walker: Walker) -> None:
    form = form_of(name, tokenizer)
    grammar = form.grammar(TOOLS, ToolChoice(), OUTPUT)
    assert grammar is not None
    for text, found in readings(form, walker, grammar, 20):
        if not found.calls:
            assert json.loads(text).keys() == {"a"}
        else:
            assert not found.said
    assert walker.admits(grammar, '{"a": 1}')
    mark = "<|python_tag|>" if name == "llama3_json" else "<|python_start|>" if name == "llama_pythonic" else ""
    assert walker.admits(grammar, mark + CALLS[name])
    assert not walker.admits(grammar, "text")


OBJECT = '{{"name": "weather", "{}": {{"city": "P", "unit": "C"}}}}'
CALLS = {
    "hermes": f"<tool_call>\n{OBJECT.format('arguments')}\n</tool_call>",
    "mistral": f"[TOOL_CALLS][{OBJECT.format('arguments')}]",
    "named": '[TOOL_CALLS]weather[ARGS]{"city": "P", "unit": "C"}',
    "ids": '[TOOL_CALLS]weather[CALL_ID]abcdefgh9[ARGS]{"city": "P", "unit": "C"}',
    "llama3_json": OBJECT.format("parameters"),
    "llama_pythonic": '[weather(city="P", unit="C")]',
}


@pytest.mark.parametrize("name", FORMATS)
def test_after_thinking(name: str, tokenizer: Tokenizer, walker: Walker) -> None:
    form = form_of(name, tokenizer, "think")
    grammar = form.grammar(TOOLS, ToolChoice(ToolMode.REQUIRED), None)
    assert grammar is not None
    assert walker.admits(grammar, f"\n\n{CALLS[name]}")
    assert walker.admits(grammar, CALLS[name])
    assert not walker.admits(grammar, f"\n\n\n{CALLS[name]}")
    found = read(form.parser(tools=TOOLS, is_thinking_open=True), [f"\nHm.\n</think>\n\n{CALLS[name]}"])
    assert (found.thought, found.said, len(found.calls)) == ("Hm.", "", 1)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("is_parallel", [True, False])
def test_several_calls(name: str, is_parallel: bool, tokenizer: Tokenizer, walker: Walker) -> None:
    form = form_of(name, tokenizer)
    grammar = form.grammar(TOOLS, ToolChoice(ToolMode.REQUIRED, is_parallel=is_parallel), None)
    assert grammar is not None
    call = CALLS[name]
    two = {
        "hermes": f"{call}\n{call}",
        "mistral": f"{call[:-1]}, {call.removeprefix('[TOOL_CALLS][')}",
        "llama3_json": f"{call}; {call}",
        "llama_pythonic": f"{call[:-1]}, {call[1:]}",
    }.get(name, call * 2)
    assert walker.admits(grammar, two) is is_parallel
    assert len(read(form.parser(tools=TOOLS, is_thinking_open=False), [two]).calls) == 2


@pytest.mark.parametrize("template", [shapes.LLAMA, shapes.LLAMA.replace("raise_exception", "")])
def test_calls_that_the_template_refuses_are_not_admitted(template: str, tokenizer: Tokenizer, walker: Walker) -> None:
    """Regression: a history with two calls was then refused, request after request."""
    form = AnswerFormat.detect(template, tokenizer)
    grammar = form.grammar(TOOLS, ToolChoice(ToolMode.REQUIRED), None)
    assert grammar is not None
    call, is_parallel = CALLS["llama3_json"], template is not shapes.LLAMA
    assert walker.admits(grammar, call)
    assert walker.admits(grammar, f"{call}; {call}") is is_parallel
    found = read(form.parser(tools=TOOLS, is_thinking_open=False), [f"{call}; {call}"])
    assert (len(found.calls), found.said) == ((2, "") if is_parallel else (1, f"; {call}"))


@pytest.mark.parametrize(
    ("choice", "tools"),
    [
        (ToolChoice(), (LOOSE,)),
        (ToolChoice(ToolMode.NONE), TOOLS),
        (ToolChoice(), ()),
    ],
)
def test_nothing_to_constrain(choice: ToolChoice, tools: tuple[Tool, ...], tokenizer: Tokenizer) -> None:
    assert form_of("hermes", tokenizer).grammar(tools, choice, None) is None


@pytest.mark.parametrize(
    ("output", "good", "bad"),
    [
        (OUTPUT, '{"a": 1}', '{"b": 1}'),
        (OutputFormat(FormatKind.JSON_OBJECT), '{"b": [1]}', "[1]"),
        (OutputFormat(FormatKind.REGEX, "a/b\\d+"), "a/b12", "a/b"),
        (OutputFormat(FormatKind.CHOICE, ["yes", 'n"o']), 'n"o', "maybe"),
        (OutputFormat(FormatKind.GRAMMAR, 'start: "x" other\nother: /y+/'), "xyy", "x"),
    ],
)
def test_output_formats(output: OutputFormat, good: str, bad: str, tokenizer: Tokenizer, walker: Walker) -> None:
    """Alone, or beside tools that may be called."""
    form = form_of("hermes", tokenizer)
    alone = form.grammar((), ToolChoice(), output)
    beside = form.grammar(TOOLS, ToolChoice(), output)
    assert alone is not None
    assert beside is not None
    for grammar in (alone, beside, AnswerFormat().grammar((), ToolChoice(), output)):
        assert grammar is not None
        assert walker.admits(grammar, good)
        assert not walker.admits(grammar, bad)
    assert walker.admits(beside, CALLS["hermes"])
    assert not walker.admits(alone, CALLS["hermes"])


@pytest.mark.parametrize("is_strict", [True, False])
def test_schemas_are_limited_together(is_strict: bool, tokenizer: Tokenizer) -> None:
    parameters = {"properties": {"a": {"enum": ["x" * 1000] * 100}}}
    tools = [Tool(name=f"f{number}", parameters=parameters, strict=is_strict) for number in range(12)]
    with pytest.raises(InvalidRequestError, match="offer fewer tools"):
        form_of("hermes", tokenizer).grammar(tools, ToolChoice(ToolMode.REQUIRED), None)
    assert form_of("hermes", tokenizer).grammar(tools[:5], ToolChoice(ToolMode.REQUIRED), None)


def test_refusals(tokenizer: Tokenizer) -> None:
    required = ToolChoice(ToolMode.REQUIRED)
    with pytest.raises(InvalidRequestError, match="required"):
        AnswerFormat().grammar(TOOLS, required, None)
    unkeepable = {"type": "object", "properties": {"a": {"type": "string"}}, "if": {}}
    with pytest.raises(InvalidRequestError, match="strict tool 'odd'"):
        form_of("hermes", tokenizer).grammar((Tool(name="odd", parameters=unkeepable, strict=True),), required, None)
    inexpressible: list[dict[str, Any]] = [{"properties": {"a-b": {}}}, {"required": ["a"]}, {"anyOf": [{}]}]
    for schema in inexpressible:
        tool = Tool(name="odd", parameters=schema, strict=True)
        with pytest.raises(InvalidRequestError, match="strict tool 'odd'"):
            form_of("llama_pythonic", tokenizer).grammar((tool,), required, None)


ITSELF = {"type": "array", "items": {"$ref": "#"}}


@pytest.mark.parametrize(
    "properties",
    [
        {"name": {}, "kids": ITSELF},
        {"a": {"type": "null"}, "b": {"$ref": "#/properties/a"}},
        {"a": {"$ref": "#/$defs/d"}},
    ],
)
def test_keywords_cannot_refer_to_the_whole(properties: dict[str, Any], tokenizer: Tokenizer, walker: Walker) -> None:
    """Regression: each property was a root of its own, and `#` meant that property."""
    parameters = {"type": "object", "properties": properties, "$defs": {"d": ITSELF}}
    choice = ToolChoice(ToolMode.REQUIRED)
    form, strict = form_of("llama_pythonic", tokenizer), Tool(name="tree", parameters=parameters, strict=True)
    with pytest.raises(InvalidRequestError, match=r"cannot express '\$ref: #.*strict tool 'tree'"):
        form.grammar((strict,), choice, None)
    grammar = form.grammar((Tool(name="tree", parameters=parameters),), choice, None)
    assert grammar is not None
    assert walker.admits(grammar, '[tree(a=[{"a": [], "b": null}])]')


def test_a_property_with_definitions_of_its_own_sees_those_of_the_whole(tokenizer: Tokenizer, walker: Walker) -> None:
    """Regression: those of the property took the place of the whole's, to which references are."""
    inner = {"$ref": "#/$defs/d", "$defs": {"d": {"type": "null"}}}
    parameters = {"type": "object", "properties": {"a": inner}, "$defs": {"d": {"type": "integer"}}}
    tool = Tool(name="f", parameters=parameters, strict=True)
    grammar = form_of("llama_pythonic", tokenizer).grammar((tool,), ToolChoice(ToolMode.REQUIRED), None)
    assert grammar is not None
    assert walker.admits(grammar, "[f(a=1)]")
    assert not walker.admits(grammar, "[f(a=null)]")


@pytest.mark.parametrize("is_strict", [False, True])
def test_keywords_of_any_names(is_strict: bool, tokenizer: Tokenizer, walker: Walker) -> None:
    """Regression: schemas without properties admitted no arguments at all."""
    values = {"type": "object", "additionalProperties": {"$ref": "#/$defs/d"}, "$defs": {"d": {"type": "integer"}}}
    tool = Tool(name="f", parameters=values, strict=is_strict)
    grammar = form_of("llama_pythonic", tokenizer).grammar((tool,), ToolChoice(ToolMode.REQUIRED), None)
    assert grammar is not None
    assert walker.admits(grammar, "[f(a=1, b=2)]")
    assert walker.admits(grammar, "[f()]")
    assert not walker.admits(grammar, '[f(a="x")]')


@pytest.mark.parametrize(("schema", "is_open"), [({"type": "object"}, True), ({"additionalProperties": False}, False)])
def test_keywords_of_a_schema_without_properties(
    schema: dict[str, Any], is_open: bool, tokenizer: Tokenizer, walker: Walker
) -> None:
    tool = Tool(name="f", parameters=schema)
    grammar = form_of("llama_pythonic", tokenizer).grammar((tool,), ToolChoice(ToolMode.REQUIRED), None)
    assert grammar is not None
    assert walker.admits(grammar, "[f()]")
    assert walker.admits(grammar, '[f(a="x", b=1)]') is is_open


@pytest.mark.parametrize("schema", [{"if": {}}, {"properties": {"a-b": {}}}, {"anyOf": [{}], "pattern": "(?="}])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_strict_is_kept_as_far_as_it_can(
    name: str, schema: dict[str, Any], tokenizer: Tokenizer, walker: Walker
) -> None:
    form = form_of(name, tokenizer)
    tool = Tool(name="weather", parameters=schema)
    grammar = form.grammar((tool,), ToolChoice(ToolMode.REQUIRED), None)
    assert grammar is not None
    assert walker.admits(grammar, CALLS[name])
