"""Turns a `Conversation` into prompt tokens and the constraints on its answer (grammar, thinking); all dialects use it.

Renders the chat template, encodes the text, and builds the grammar. Invariant: a constraint that a conversation asks
for is enforced during generation, or the request is refused.
"""

import asyncio
from array import array
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tandem.core.errors import InvalidRequestError
from tandem.core.hashing import root_hash
from tandem.core.pins import Pin
from tandem.core.reasoning import Reasoning, ReasoningState
from tandem.core.sampling_params import SamplingParams
from tandem.core.scope import CacheScope
from tandem.gateway.conversation import Breakpoint, Conversation, Effort, Tool, ToolChoice, ToolMode
from tandem.gateway.dialect import DialectContext
from tandem.gateway.errors import RequestError
from tandem.gateway.known_conversations import KnownBeginning
from tandem.gateway.marked_conversation import MarkedConversation
from tandem.gateway.model import ServedModel
from tandem.gateway.one_system import with_one_system
from tandem.gateway.parsing.call_rules import enforced_tools
from tandem.gateway.parts import AnswerParser
from tandem.gateway.prompt_encoder import CannotResumeError, ChainRoot, EncodedPrompt, EncodingCounts, check_length
from tandem.gateway.request import ChoiceResult
from tandem.gateway.resuming import Resumable, why_not
from tandem.rpc.messages import ModelInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """A conversation as tokens, with the constraints on its answer.

    Args:
        prompt: the text that `encoded` encodes; of a resumed conversation, only its end.
        pins: prefixes that the conversation's cache breakpoints keep; empty ones are left out.
        grammar, reasoning, skip_special_tokens: as in `SamplingParams`.
        tools: the tools that the answer may call.
        call_ids: as in `Conversation`.
        is_call_forced: the grammar admits only calls.
        is_thinking_open: the prompt ends inside thinking.
        beginning: known beginning for a later conversation that continues this one.
        why_whole: reason why there is no such beginning, where one was wanted.
    """

    model: ServedModel
    prompt: str
    encoded: EncodedPrompt
    pins: tuple[Pin, ...]
    grammar: str | None
    reasoning: Reasoning | None
    skip_special_tokens: bool
    tools: tuple[Tool, ...]
    call_ids: Collection[str]
    is_call_forced: bool
    is_thinking_open: bool
    beginning: KnownBeginning | None = None
    why_whole: str = ""

    @property
    def token_ids(self) -> "array[int]":
        """The prompt; not to be modified."""
        return self.encoded.token_ids

    @property
    def encoding(self) -> EncodingCounts:
        """Counts of what was encoded, and of what was cached, for the request's trace."""
        return self.encoded.counts

    def params(self, params: SamplingParams) -> SamplingParams:
        """Returns `params` with this conversation's grammar, detection of thinking and treatment of special tokens.

        Raises:
            InvalidRequestError: naming an option that contradicts them.
        """
        return replace(
            params,
            grammar=self.grammar,
            reasoning=self.reasoning,
            skip_special_tokens=params.skip_special_tokens and self.skip_special_tokens,
        )

    def new_result(self, *, keep: bool, is_prompt_only: bool = False) -> ChoiceResult:
        """A new result for one answer; `keep` and `is_prompt_only` as in `ChoiceResult`."""
        reasoning = None if self.reasoning is None else ReasoningState(self.reasoning)
        return ChoiceResult(
            len(self.token_ids), keep, self._new_parser(), reasoning, self.pins, is_prompt_only=is_prompt_only
        )

    def _new_parser(self) -> AnswerParser:
        return self.model.answers.parser(
            tools=self.tools,
            is_thinking_open=self.is_thinking_open,
            used_ids=self.call_ids,
            is_forced=self.is_call_forced,
        )


async def assemble(
    conversation: Conversation,
    context: DialectContext,
    info: ModelInfo,
    scope: CacheScope,
    *,
    is_only_counted: bool = False,
    beginning: KnownBeginning | None = None,
    next_start: int | None = None,
) -> Assembled:
    """Renders and encodes a conversation and determines the constraints on its answer.

    Args:
        scope: the cache scope, isolated for the caller; only prompts of the same scope are found in the caches.
        is_only_counted: the tokens are only counted, so the prompt may exceed the context.
        beginning: known beginning to resume from; messages before its second-to-last, except the first, may be
            `UNREAD`.
        next_start: index of the message at which a later conversation may be resumed, if the template allows it.

    Raises:
        InvalidRequestError: the model's template refuses it, it is too long, or a rule cannot be kept.
        CannotResumeError: it cannot be resumed from `beginning`.
    """
    model, answers = context.model, context.model.answers
    why_whole = why_not(conversation) if next_start is not None or beginning is not None else ""
    if beginning is not None and why_whole is not None:
        raise CannotResumeError(why_whole)
    asked = _without_unused_tools(
        with_one_system(conversation) if model.has_one_system and beginning is None else conversation
    )
    _check_abilities(asked, model)
    variables = _thinking_variables(asked, model)
    root = root_hash(scope, model_fingerprint=info.fingerprint, block_size=info.block_size)
    template_variables = _template_variables(asked, variables)
    resumable = Resumable(asked, template_variables, root, model, next_start, beginning)
    rest = await resumable.render() if why_whole is None else why_whole
    rendered = await _render(asked, variables, model) if isinstance(rest, str) else rest.text
    grammar = await _grammar(asked, model, info)
    prompt = _begin_thinking(rendered, grammar, asked, model)
    _check_marks(rendered, prompt, grammar, asked, model)
    is_open = answers.thinking is not None and answers.thinking.is_open(prompt)
    reasoning = answers.reasoning(model.tokenizer, is_open=is_open, budget=_budget(asked, model))
    encoded = await model.encoder.encode_chat(
        prompt,
        info.max_model_len,
        ChainRoot(root, info.block_size),
        add_special_tokens=asked.add_special_tokens,
        is_only_counted=is_only_counted,
        beginning=None if beginning is None else beginning.cut,
    )
    if not is_only_counted:
        check_length(encoded.token_ids, info.max_model_len)
    if beginning is None:
        num_pinned = await _num_pinned(asked, variables, prompt, encoded, model)
    else:
        num_pinned = await resumable.num_pinned(prompt, encoded)
    pins = (Pin(number, point.ttl_s) for number, point in zip(num_pinned, asked.breakpoints, strict=True) if number)
    return Assembled(
        model=model,
        prompt=prompt,
        encoded=encoded,
        pins=tuple(pins),
        grammar=grammar,
        reasoning=reasoning,
        skip_special_tokens=not (answers.needs_special_tokens and (asked.tools or answers.thinking is not None)),
        tools=asked.tools,
        call_ids=asked.call_ids,
        is_call_forced=asked.tool_choice.mode is ToolMode.REQUIRED,
        is_thinking_open=is_open,
        beginning=None if isinstance(rest, str) else resumable.next_beginning(prompt, encoded, rest, num_pinned),
        why_whole=rest if isinstance(rest, str) else "",
    )


async def _grammar(asked: Conversation, model: ServedModel, info: ModelInfo) -> str | None:
    """The answer's grammar, checked; None without constraints. Drops unenforceable schemas of non-strict tools."""
    grammar = await _written(asked, model)
    try:
        await _check(grammar, model, info)
    except InvalidRequestError:
        free = await _only_offered(asked, model, info)
        if not free:
            raise
        grammar = await _written(asked, model, free)
        await _check(grammar, model, info)
    return grammar


async def _only_offered(asked: Conversation, model: ServedModel, info: ModelInfo) -> frozenset[str]:
    """Names of non-strict tools whose schemas the grammar compiler refuses. Each is tried alone, as its error names no
    tool.

    Raises:
        InvalidRequestError: naming a strict tool whose schema it refuses.
    """
    found = set()
    one = ToolChoice(ToolMode.REQUIRED, is_parallel=False)
    for tool in enforced_tools(asked.tools, asked.tool_choice):
        try:
            await _check(await _written(replace(asked, tools=(tool,), tool_choice=one), model), model, info)
        except InvalidRequestError as error:
            if tool.strict:
                raise InvalidRequestError(f"the parameters of the strict tool {tool.name!r}: {error}") from error
            found.add(tool.name)
    return frozenset(found)


async def _check(grammar: str | None, model: ServedModel, info: ModelInfo) -> None:
    if grammar is not None:
        await model.check_grammar(grammar, info)


async def _written(asked: Conversation, model: ServedModel, free: Collection[str] = ()) -> str | None:
    """The grammar as text. NOTE: large schemas take a while, so a thread does the work and no stream is delayed."""
    wanted = (asked.tools, asked.tool_choice, asked.output_format, free)
    if not asked.tools and asked.output_format is None:
        return model.answers.grammar(*wanted)
    return await asyncio.to_thread(model.answers.grammar, *wanted)


def _without_unused_tools(conversation: Conversation) -> Conversation:
    """The conversation without tools where none may be called."""
    return replace(
        conversation,
        tools=() if conversation.tool_choice.mode is ToolMode.NONE else conversation.tools,
        breakpoints=tuple(
            place
            for place in conversation.breakpoints
            if place.tool is None or conversation.tool_choice.mode is not ToolMode.NONE
        ),
    )


def _check_abilities(asked: Conversation, model: ServedModel) -> None:
    if asked.tools and model.answers.tools is None:
        raise RequestError(
            f"the model {model.name!r} is not known to call tools; leave them out, or have the operator name the "
            "format of its calls (--tool-parser)",
            param="tools",
        )
    is_shown = model.template is None or model.template.mentions("documents", has_tools=bool(asked.tools))
    if asked.documents and not is_shown:
        raise RequestError(
            f"the chat template of {model.name!r} shows no documents; put their text into a message", param="documents"
        )


def _thinking_variables(asked: Conversation, model: ServedModel) -> Mapping[str, Any]:
    """Template variables, with thinking switched on or off by the effort. Raises RequestError if the two contradict."""
    thinking, effort = model.answers.thinking, asked.thinking.effort
    if thinking is None or effort is None or thinking.variable is None:
        return asked.variables
    wanted = effort is not Effort.NONE
    if asked.variables.get(thinking.variable, wanted) is not wanted:
        raise RequestError(
            f"the effort {effort.value!r} and {thinking.variable}={asked.variables[thinking.variable]} contradict each "
            "other; send one of them",
            param="reasoning_effort",
        )
    return {**asked.variables, thinking.variable: wanted}


async def _render(asked: Conversation, variables: Mapping[str, Any], model: ServedModel) -> str:
    """The prompt; if the answer continues the last message, it ends where that message does."""
    whole = await _render_whole(asked, variables, model)
    if not asked.is_continued:
        return whole
    last = len(asked.messages) - 1
    end = Breakpoint(1.0, message=last, offset=len(asked.messages[last].get("content") or ""))
    length = await _place(end, asked, variables, whole, model)
    if not length:
        raise RequestError(
            f"the chat template of {model.name!r} does not show a last message of the assistant's as it is, so the "
            "answer cannot go on with it; end with the user's",
            param="messages",
        )
    return whole[:length]


async def _render_whole(asked: Conversation, variables: Mapping[str, Any], model: ServedModel) -> str:
    return await model.render(asked.messages, _template_variables(asked, variables))


def _template_variables(asked: Conversation, variables: Mapping[str, Any]) -> dict[str, Any]:
    """All variables of the template besides the messages."""
    template_variables = {"add_generation_prompt": False, **variables} if asked.is_continued else dict(variables)
    if asked.tools:
        template_variables["tools"] = [_described(tool) for tool in asked.tools]
    if asked.documents:
        template_variables["documents"] = list(asked.documents)
    return template_variables


def _described(tool: Tool) -> dict[str, Any]:
    """A tool as chat templates of Hugging Face checkpoints expect it."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function | {"parameters": dict(tool.parameters)}}


def _begin_thinking(prompt: str, grammar: str | None, asked: Conversation, model: ServedModel) -> str:
    """The prompt, with thinking opened if needed.

    NOTE: a grammar begins after the thinking, so it must be certain before generation whether there is any.
    """
    thinking = model.answers.thinking
    if grammar is None or thinking is None or asked.is_continued or asked.thinking.effort is Effort.NONE:
        return prompt
    if thinking.is_open(prompt) or prompt.rstrip().endswith(thinking.end) or not _may_think(asked, model):
        return prompt
    return f"{prompt}{thinking.start}\n"


def _check_marks(rendered: str, prompt: str, grammar: str | None, asked: Conversation, model: ServedModel) -> None:
    """Raises RequestError for a grammar or thinking budget, where the end of thinking cannot be detected in tokens."""
    thinking, budget = model.answers.thinking, _budget(asked, model)
    if thinking is None or thinking.has_fixed_tokens or (grammar is None and budget is None):
        return
    is_switched_off = thinking.variable is not None and asked.thinking.effort is Effort.NONE
    if not thinking.is_open(prompt) and (grammar is not None or is_switched_off or asked.is_continued):
        return
    may_switch = thinking.variable is not None or (grammar is not None and not thinking.is_open(rendered))
    what, param = _asked_of_thinking(grammar, budget, asked)
    raise RequestError(
        f"{what} cannot be kept beside the thinking of {model.name!r}, since its marks {thinking.start!r} and "
        f"{thinking.end!r} are no tokens of their own; leave it out"
        + (", or turn thinking off for this request (reasoning_effort 'none')" if may_switch else ""),
        param=param,
    )


def _asked_of_thinking(grammar: str | None, budget: int | None, asked: Conversation) -> tuple[str, str]:
    """The constraint that cannot be enforced, and the field that asks for it."""
    if grammar is not None and asked.output_format is not None:
        return "an output format", "response_format"
    if grammar is not None:
        return "a forced, single or strict call", "tool_choice"
    if asked.thinking.budget is not None or asked.thinking.effort is None:
        return f"a budget of {budget} thinking tokens", "reasoning_effort"
    return f"the effort {asked.thinking.effort.value!r}", "reasoning_effort"


def _may_think(asked: Conversation, model: ServedModel) -> bool:
    thinking = model.answers.thinking
    assert thinking is not None
    if asked.thinking.effort is not None or asked.thinking.budget is not None:
        return True
    setting = None if thinking.variable is None else asked.variables.get(thinking.variable)
    return thinking.is_default if setting is None else bool(setting)


def _budget(asked: Conversation, model: ServedModel) -> int | None:
    thinking = model.answers.thinking
    if thinking is None or asked.thinking.budget is not None:
        return asked.thinking.budget
    return None if asked.thinking.effort is None else thinking.budgets[asked.thinking.effort]


async def _num_pinned(
    asked: Conversation, variables: Mapping[str, Any], prompt: str, encoded: EncodedPrompt, model: ServedModel
) -> list[int]:
    """Number of tokens before each breakpoint."""
    if not asked.breakpoints:
        return []
    places = [await _place(point, asked, variables, prompt, model) for point in asked.breakpoints]
    return await model.encoder.count_tokens(encoded, places, add_special_tokens=asked.add_special_tokens)


async def _place(
    point: Breakpoint, asked: Conversation, variables: Mapping[str, Any], prompt: str, model: ServedModel
) -> int:
    """Number of characters of `prompt` before a breakpoint."""
    marked = MarkedConversation.of(asked, point)
    return marked.place(await _render_whole(marked.conversation, variables, model), prompt)
