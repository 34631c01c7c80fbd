"""Writes the grammar of an answer that must or may call tools, or must have a given format. Pure text.

Calls have the notation of the model's family. Invariant: the family's parser reads everything that the grammar admits
as it was meant. The grammar applies to the text after the thinking.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import replace

from tandem.core.errors import InvalidRequestError
from tandem.gateway.conversation import OutputFormat, Tool, ToolChoice, ToolMode
from tandem.gateway.parsing.call_rules import CallRules, callees
from tandem.gateway.parsing.lark import Lark, literal
from tandem.gateway.parsing.output_rules import output_grammar
from tandem.gateway.parsing.tool_format import ToolFormat

_AFTER_THINKING = 'lead: ("\\n" | "\\n\\n")?\n'
_AT_ONCE = 'lead: ""\n'


def answer_grammar(
    form: ToolFormat | None,
    lark: Lark,
    tools: Sequence[Tool],
    choice: ToolChoice,
    output: OutputFormat | None,
    *,
    may_think: bool,
    free: Collection[str] = (),
) -> str | None:
    """The grammar for llguidance; None where nothing constrains the answer.

    Args:
        may_think: up to two line breaks may come before a call, as between thinking and answer.
        free: names of non-strict tools whose schemas are not enforced.

    Raises:
        InvalidRequestError: a call is required of a model that makes none, or a schema cannot be enforced.
    """
    if choice.mode is ToolMode.REQUIRED and (form is None or not tools):
        raise InvalidRequestError("a tool call is required, but this model has no tools it could call")
    if form is None or not tools or choice.mode is ToolMode.NONE:
        return None if output is None else output_grammar(output)
    if choice.mode is ToolMode.AUTO and output is None and not _binds(tools, choice):
        return None
    rules = form.rules(callees(tools, choice, free), is_parallel=choice.is_parallel, lark=lark)
    rest = f"calls: {rules.body}\n{_AFTER_THINKING if may_think else _AT_ONCE}{rules.rules}"
    if choice.mode is ToolMode.REQUIRED:
        return _whole(f"start: {_calls(rules, lark)}\n{rest}")
    if output is not None:
        return _whole(f"start: @answer | {_calls(_unmistakable(rules), lark)}\n{rest}", output_grammar(output))
    return _whole(_free(rules, lark) + rest)


def _binds(tools: Sequence[Tool], choice: ToolChoice) -> bool:
    """Whether the answer is constrained although the model is free to call tools or not."""
    return bool(choice.names) or not choice.is_parallel or any(tool.strict for tool in tools)


def _calls(rules: CallRules, lark: Lark) -> str:
    return " | ".join(f"lead {lark.mark(mark)} calls" if mark else "lead calls" for mark in rules.openings)


def _unmistakable(rules: CallRules) -> CallRules:
    """Rules that require an opening mark, if there is one: without it a call could be taken for JSON output."""
    marks = tuple(mark for mark in rules.openings if mark)
    return replace(rules, openings=marks)


def _free(rules: CallRules, lark: Lark) -> str:
    """Grammar of any text, with or without calls after it. NOTE: a mark spelled out as text begins calls too."""
    first = rf"[ \t\r\n]*[^ \t\r\n\{rules.first_character}]" if rules.first_character else "(?s:.)"
    ways, heads = ["TEXT?"], []
    for index, mark in enumerate(rules.openings):
        if not mark:
            ways.append("lead calls")
            continue
        ways.append(f"head_{index} calls")
        heads.append(f"head_{index}[lazy]: HEAD_{index}\nHEAD_{index}: TEXT? {literal(mark)}\n")
        if lark.is_special(mark):
            ways.append(f"TEXT? {lark.mark(mark)} calls")
    return f"start: {' | '.join(ways)}\nTEXT: /{first}(?s:.*)/\n{''.join(heads)}"


def _whole(lark: str, answer: str | None = None) -> str:
    """The complete grammar. `answer`: a grammar that `lark` refers to."""
    named = [] if answer is None else [{"name": "answer", **json.loads(answer)["grammars"][0]}]
    return json.dumps({"grammars": [{"lark_grammar": lark}, *named]})
