"""`/v1/messages` and `/v1/messages/count_tokens`: parses a conversation; answers with a message or its token count."""

from functools import partial

import orjson

from tandem.core.sampling_params import SamplingParams, validate_for_vocab
from tandem.core.scope import UNSCOPED
from tandem.gateway.anthropic.fields import MessagesBody, MessagesPromptBody, read_body
from tandem.gateway.anthropic.frames import PING, error_body, status_of
from tandem.gateway.anthropic.prompt import ParsedPrompt, read_prompt
from tandem.gateway.anthropic.thinking import check_budget
from tandem.gateway.anthropic.writer import MessageWriter
from tandem.gateway.assembly import assemble
from tandem.gateway.choices import expected_output, make_choices
from tandem.gateway.dialect import DialectContext, Isolate, ParsedRequest
from tandem.gateway.errors import Problem, RequestError
from tandem.gateway.known_body import KnownBody
from tandem.gateway.known_conversations import KnownConversation
from tandem.gateway.request import ServeRequest
from tandem.rpc.messages import ModelInfo


class MessagesDialect:
    """Parses bodies of `/v1/messages`: a `Dialect`, whose methods `answer` calls (`gateway.dialect`)."""

    kind = "messages"
    ping = PING

    def __init__(self, dialect_context: DialectContext) -> None:
        self._context = dialect_context

    async def read(self, body: bytes, request_id: str, isolate: Isolate) -> ParsedRequest:
        """Parses a body; raises as `Dialect.read`."""
        known = KnownBody(self._context.model.conversations, body, isolate(UNSCOPED), self.kind)
        return await known.read(partial(self._read, known, request_id, isolate))

    async def _read(
        self, known_body: KnownBody, request_id: str, isolate: Isolate, known: KnownConversation | None
    ) -> ParsedRequest:
        """Parses a body, shortened if `known` is given. Raises CannotResumeError if the whole body has to be parsed."""
        parse = partial(read_body, MessagesBody)
        asked, spans = await known_body.parsed(known, self._context.off_loop, parse, "messages")
        prompt = _read_prompt(asked, self._context, known)
        check_budget(prompt.thinking, asked.max_tokens)
        info = await self._context.model_info.get()
        params = _params(asked, info)
        resume_turn = None if spans is None else prompt.resume_turn
        assembled = await assemble(
            prompt.conversation,
            self._context,
            info,
            isolate(UNSCOPED),
            beginning=None if known is None else known.beginning,
            next_start=None if resume_turn is None else resume_turn.number,
        )
        if resume_turn is not None and spans is not None and assembled.beginning is not None:
            known_body.keep(resume_turn.entry(spans, known, assembled.beginning))
        params = assembled.params(params)
        request = ServeRequest(
            request_id=request_id,
            model=info.name,
            choices=make_choices(request_id, [assembled.token_ids], params, self._context.fresh),
            num_expected_output=expected_output(params),
            scope=UNSCOPED,
            pins=assembled.pins,
        )
        result = assembled.new_result(keep=not asked.stream, is_prompt_only=asked.max_tokens == 0)
        writer = MessageWriter(
            f"msg_{request_id}", info.name, result, asked.max_tokens, shows_thinking=prompt.thinking.is_shown
        )
        encoding = known_body.counted(assembled, known)
        return ParsedRequest(request, (result,), writer, bool(asked.stream), encoding=encoding)

    def problem(self, problem: Problem, request_id: str) -> tuple[int, bytes]:
        return status_of(problem), error_body(problem, request_id)


async def count_tokens(body: bytes, context: DialectContext, isolate: Isolate) -> bytes:
    """The body of `/v1/messages/count_tokens`: the number of prompt tokens.

    Raises:
        InvalidRequestError: as for a message, except that a prompt may be longer than the context.
        UnavailableError: no worker is known.
    """
    prompt = _read_prompt(await context.off_loop.run(len(body), partial(read_body, MessagesPromptBody, body)), context)
    info = await context.model_info.get()
    assembled = await assemble(prompt.conversation, context, info, isolate(UNSCOPED), is_only_counted=True)
    return orjson.dumps({"input_tokens": len(assembled.token_ids)})


def _read_prompt(
    asked: MessagesPromptBody, context: DialectContext, known: KnownConversation | None = None
) -> ParsedPrompt:
    context.model.require(asked.model)
    prompt = read_prompt(asked, context.limits.max_messages, known)
    if prompt.thinking.is_required and context.model.answers.thinking is None:
        raise RequestError(
            f"thinking is enabled, but the model {context.model.name!r} is not known to think; leave it out",
            param="thinking",
        )
    return prompt


def _params(asked: MessagesBody, info: ModelInfo) -> SamplingParams:
    """NOTE: filling the cache (max_tokens 0) needs one generated token, which is not shown to the client."""
    own = {name: getattr(asked, name) for name in ("temperature", "top_p", "top_k", "seed", "speculate")}
    given = {name: value for name, value in own.items() if value is not None}
    stop = tuple(asked.stop_sequences or ())
    params = SamplingParams(**{**info.sampling_defaults, **given, "max_tokens": max(1, asked.max_tokens), "stop": stop})
    validate_for_vocab(params, info.vocab_size)
    return params
