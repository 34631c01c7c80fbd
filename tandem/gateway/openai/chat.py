"""`/v1/chat/completions`: parses a conversation; answers with one message for each choice."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from tandem.core.scope import UNSCOPED, CacheScope
from tandem.gateway.assembly import assemble
from tandem.gateway.cache_lifetimes import lifetime_s
from tandem.gateway.choices import check_num_choices, expected_output, make_choices
from tandem.gateway.conversation import UNREAD, Conversation, Effort, Thinking
from tandem.gateway.dialect import DialectContext, Isolate, ParsedRequest
from tandem.gateway.errors import Problem, RequestError
from tandem.gateway.known_body import KnownBody
from tandem.gateway.known_conversations import KnownConversation, ResumePlaces
from tandem.gateway.limits import check_free_form
from tandem.gateway.openai.chat_writer import ChatWriter
from tandem.gateway.openai.envelope import Envelope
from tandem.gateway.openai.fields import ChatBody, read_body
from tandem.gateway.openai.frames import PING, error_body
from tandem.gateway.openai.messages import DEFAULT_LIFETIME_S, MessageReader, moved
from tandem.gateway.openai.sampling import read_params
from tandem.gateway.openai.tools import read_format, read_tools
from tandem.gateway.prompt_encoder import CannotResumeError
from tandem.gateway.request import ServeRequest


class ChatDialect:
    """Parses bodies of chat completions: a `Dialect`, whose methods `answer` calls (`gateway.dialect`)."""

    kind = "chat"
    ping = PING

    def __init__(self, dialect_context: DialectContext) -> None:
        self._context = dialect_context

    async def read(self, body: bytes, request_id: str, isolate: Isolate) -> ParsedRequest:
        """Parses a body; raises as `Dialect.read`.

        NOTE: whatever is refused of a shortened body is read once more as a whole, whose errors name the right place.
        """
        known = KnownBody(self._context.model.conversations, body, isolate(UNSCOPED), self.kind)
        return await known.read(partial(self._read, known, request_id, isolate))

    async def _read(
        self, known_body: KnownBody, request_id: str, isolate: Isolate, known: KnownConversation | None
    ) -> ParsedRequest:
        """Parses a body, shortened if `known` is given. Raises CannotResumeError if the whole body has to be parsed."""
        asked, spans = await known_body.parsed(known, self._context.off_loop, partial(read_body, ChatBody), "messages")
        if known is not None and asked.cache_salt:
            raise CannotResumeError("the conversation has a salt of its own")
        model = self._context.model
        model.require(asked.model)
        check_num_choices(1, asked.n, self._context.limits.max_choices)
        num_left_out = 0 if known is None else known.num_left_out
        reader = MessageReader(_default_lifetime_s(asked), () if known is None else known.calls)
        conversation = self._conversation(asked, reader, num_left_out)
        places = None if spans is None or asked.cache_salt else _resume_places(reader, len(spans.starts))
        info = await self._context.model_info.get()
        params = read_params(asked, info, model.tokenizer, max_tokens=_max_tokens(asked), logprobs=_num_logprobs(asked))
        scope = CacheScope(salt=asked.cache_salt or "")
        assembled = await assemble(
            conversation,
            self._context,
            info,
            isolate(scope),
            beginning=None if known is None else known.beginning,
            next_start=None if places is None else places.last + num_left_out,
        )
        if spans is not None and places is not None and assembled.beginning is not None:
            shown = spans if known is None else known.spans(spans)
            calls = reader.calls_before(places.parse_from)
            entry = KnownConversation.of(shown, places, calls, assembled.beginning, num_left_out=num_left_out)
            known_body.keep(entry)
        params = assembled.params(params)
        request = ServeRequest(
            request_id=request_id,
            model=model.name,
            choices=make_choices(request_id, [assembled.token_ids], params, self._context.fresh),
            num_expected_output=expected_output(params),
            priority=asked.priority or 0,
            scope=scope,
            session_id=asked.prompt_cache_key,
            pins=assembled.pins,
            local_prefill=params.prompt_logprobs is not None,
        )
        is_stream = bool(asked.stream)
        results = tuple(assembled.new_result(keep=not is_stream) for _ in request.choices)
        envelope = Envelope.of(asked, f"chatcmpl-{request_id}", "chat.completion", info, results, params.n)
        writer = ChatWriter(envelope, asked, model.tokenizer, assembled.token_ids)
        encoding = known_body.counted(assembled, known)
        return ParsedRequest(request, results, writer, is_stream, encoding=encoding)

    def problem(self, problem: Problem, request_id: str) -> tuple[int, bytes]:
        return problem.status, error_body(problem)

    def _conversation(self, asked: ChatBody, reader: MessageReader, num_left_out: int) -> Conversation:
        """Translates the body. `num_left_out`: number of messages after the first that a shortened body lacks."""
        tools, choice = read_tools(asked.tools, asked.tool_choice, asked.parallel_tool_calls)
        first, *later = reader.read(asked.messages, self._context.limits.max_messages - num_left_out)
        messages = [first, *([UNREAD] * num_left_out), *later]
        if asked.continue_final_message and (later or [first])[-1]["role"] != "assistant":
            raise RequestError(
                "continue_final_message is only for a last message of the assistant's", param="continue_final_message"
            )
        return Conversation(
            messages=messages,
            tools=tools,
            tool_choice=choice,
            output_format=read_format(asked.response_format, asked.structured_outputs),
            thinking=Thinking(self._effort(asked)),
            variables=template_variables(asked.chat_template_kwargs, asked.add_generation_prompt),
            documents=tuple(asked.documents or ()),
            breakpoints=tuple(moved(point, 1, num_left_out) for point in reader.breakpoints),
            call_ids=frozenset(reader.call_ids),
            add_special_tokens=bool(asked.add_special_tokens),
            is_continued=bool(asked.continue_final_message),
        )

    def _effort(self, asked: ChatBody) -> Effort | None:
        """The reasoning effort; refused for a model that does not think."""
        if self._context.model.answers.thinking is not None:
            return asked.reasoning_effort
        if asked.reasoning_effort not in (None, Effort.NONE):
            raise RequestError(
                f"reasoning_effort={asked.reasoning_effort} is for models that think, and {self._context.model.name!r} "
                "is not known to; leave it out",
                param="reasoning_effort",
                code="unsupported_parameter",
            )
        return None


def _resume_places(reader: MessageReader, num_messages: int) -> ResumePlaces | None:
    """The last message at which the next body may be resumed: before any cache breakpoint, as clients move these on."""
    marked = [point.message for point in reader.breakpoints if point.message]
    last = min(marked, default=num_messages) - 1
    return ResumePlaces(last, last - 1) if last > 1 else None


def _default_lifetime_s(asked: ChatBody) -> float:
    options = asked.prompt_cache_options
    if options is None or options.ttl is None:
        return DEFAULT_LIFETIME_S
    return lifetime_s(options.ttl, "prompt_cache_options")


def _max_tokens(asked: ChatBody) -> int | None:
    """The limit on output tokens, under either of its two names; refused if they differ."""
    newer, older = asked.max_completion_tokens, asked.max_tokens
    if newer is not None and older is not None and newer != older:
        raise RequestError(
            f"max_completion_tokens={newer} and max_tokens={older} differ; send one of them",
            param="max_completion_tokens",
        )
    return older if newer is None else newer


def _num_logprobs(asked: ChatBody) -> int | None:
    if asked.top_logprobs is not None and not asked.logprobs:
        raise RequestError("top_logprobs is only for logprobs=true", param="top_logprobs")
    if asked.prompt_logprobs is not None and asked.stream:
        raise RequestError("prompt_logprobs is not for stream=true", param="prompt_logprobs")
    return (asked.top_logprobs or 0) if asked.logprobs else None


def template_variables(given: Mapping[str, Any] | None, add_generation_prompt: bool | None) -> dict[str, Any]:
    """Variables of the template besides the messages. Raises RequestError for names that have a field of their own."""
    variables = dict(check_free_form(given or {}, "chat_template_kwargs"))
    for name in ("tools", "documents", "messages"):
        if name in variables:
            raise RequestError(f"chat_template_kwargs may not hold {name}", param="chat_template_kwargs")
    if add_generation_prompt is not None:
        variables["add_generation_prompt"] = add_generation_prompt
    return variables
