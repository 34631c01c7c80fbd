"""`/v1/completions`: parses prompts (text or token ids); answers with continuations, echo and logprobs as requested."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import orjson

from tandem.core.sampling_params import SamplingParams
from tandem.core.scope import CacheScope
from tandem.core.types import TokenLogprobs
from tandem.gateway.choices import check_num_choices, expected_output, make_choices
from tandem.gateway.conversation import ToolChoice
from tandem.gateway.dialect import DialectContext, Isolate, ParsedRequest
from tandem.gateway.errors import Problem, RequestError
from tandem.gateway.openai.envelope import Envelope
from tandem.gateway.openai.fields import CompletionBody, read_body
from tandem.gateway.openai.frames import PING, error_body, error_frames, frame
from tandem.gateway.openai.logprobs import completion_logprobs, prompt_logprobs, with_top
from tandem.gateway.openai.sampling import read_params
from tandem.gateway.openai.tools import read_format
from tandem.gateway.openai.usage import finish_reason
from tandem.gateway.prompt_encoder import check_length
from tandem.gateway.request import ChoiceResult, ChoiceUpdate, ServeRequest
from tandem.rpc.messages import ModelInfo
from tandem.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16  # as OpenAI has it


class CompletionDialect:
    """Parses bodies of completions: a `Dialect`, whose methods `answer` calls (`gateway.dialect`)."""

    kind = "text_completion"
    ping = PING

    def __init__(self, dialect_context: DialectContext) -> None:
        self._context = dialect_context

    async def read(self, body: bytes, request_id: str, isolate: Isolate) -> ParsedRequest:
        """Parses a body; raises as `Dialect.read`."""
        asked = await self._context.off_loop.run(len(body), partial(read_body, CompletionBody, body))
        model = self._context.model
        model.require(asked.model)
        prompts = _prompts(asked)
        check_num_choices(len(prompts), asked.n, self._context.limits.max_choices)
        info = await self._context.model_info.get()
        if asked.prompt_logprobs is not None and asked.stream:
            raise RequestError("prompt_logprobs is not for stream=true", param="prompt_logprobs")
        params = await self._constrained(_params(asked, info, model.tokenizer), asked, info)
        token_ids = [await self._encode(prompt, asked, info) for prompt in prompts]
        request = ServeRequest(
            request_id=request_id,
            model=model.name,
            choices=make_choices(request_id, token_ids, params, self._context.fresh),
            num_expected_output=expected_output(params),
            priority=asked.priority or 0,
            scope=CacheScope(salt=asked.cache_salt or ""),
            session_id=asked.prompt_cache_key,
            local_prefill=params.prompt_logprobs is not None,
        )
        is_stream, is_prompt_only = bool(asked.stream), asked.max_tokens == 0
        results = tuple(
            ChoiceResult(len(choice.prompt_token_ids), not is_stream, is_prompt_only=is_prompt_only)
            for choice in request.choices
        )
        envelope = Envelope.of(asked, f"cmpl-{request_id}", "text_completion", info, results, params.n)
        sources = [EchoedPrompt(prompt, ids, model.tokenizer) for prompt, ids in zip(prompts, token_ids, strict=True)]
        return ParsedRequest(request, results, CompletionWriter(envelope, asked, model.tokenizer, sources), is_stream)

    def problem(self, problem: Problem, request_id: str) -> tuple[int, bytes]:
        return problem.status, error_body(problem)

    async def _constrained(self, params: SamplingParams, asked: CompletionBody, info: ModelInfo) -> SamplingParams:
        output = read_format(asked.response_format, asked.structured_outputs)
        if output is None:
            return params
        grammar = await asyncio.to_thread(self._context.model.answers.grammar, (), ToolChoice(), output)
        assert grammar is not None
        await self._context.model.check_grammar(grammar, info)
        return replace(params, grammar=grammar)

    async def _encode(self, prompt: str | list[int], asked: CompletionBody, info: ModelInfo) -> list[int]:
        if isinstance(prompt, str):
            is_special = asked.add_special_tokens is not False
            encoder = self._context.model.encoder
            token_ids = await encoder.encode(prompt, info.max_model_len, add_special_tokens=is_special)
            check_length(token_ids, info.max_model_len)
            return token_ids
        check_length(prompt, info.max_model_len)
        for token_id in (min(prompt), max(prompt)):
            if not 0 <= token_id < info.vocab_size:
                raise RequestError(
                    f"prompt token {token_id} is not an id from 0 to {info.vocab_size - 1}", param="prompt"
                )
        return prompt


def _params(asked: CompletionBody, info: ModelInfo, tokenizer: Tokenizer) -> SamplingParams:
    """Sampling parameters of a body.

    NOTE: an echo with logprobs needs prompt logprobs, which are computed with the request; computing a prompt generates
    one token, which is dropped if none was requested.
    """
    max_tokens = DEFAULT_MAX_TOKENS if asked.max_tokens is None else asked.max_tokens
    if max_tokens == 0:
        if asked.min_tokens:
            raise RequestError(f"min_tokens={asked.min_tokens} exceeds max_tokens=0", param="min_tokens")
        max_tokens = 1
    params = read_params(asked, info, tokenizer, max_tokens=max_tokens, logprobs=asked.logprobs)
    if not asked.echo or asked.logprobs is None:
        return params
    return replace(params, prompt_logprobs=max(asked.logprobs, asked.prompt_logprobs or 0))


class EchoedPrompt:
    """A prompt's text and token ids, for its echo."""

    __slots__ = ("_given", "_tokenizer", "token_ids")

    def __init__(self, given: str | list[int], token_ids: Sequence[int], tokenizer: Tokenizer) -> None:
        self._given = given
        self._tokenizer = tokenizer
        self.token_ids = token_ids

    @property
    def text(self) -> str:
        if isinstance(self._given, str):
            return self._given
        return self._tokenizer.decode(self.token_ids, skip_special_tokens=False)


class CompletionWriter:
    """Writes the answers to one or more prompts: a `Writer`, whose methods `answer` calls (`gateway.dialect`)."""

    def __init__(
        self, envelope: Envelope, asked: CompletionBody, tokenizer: Tokenizer, sources: Sequence[EchoedPrompt]
    ) -> None:
        self._envelope = envelope
        self._tokenizer = tokenizer
        self._sources = sources
        self._has_echo = bool(asked.echo)
        self._num_top = asked.logprobs
        self._num_prompt_top = asked.prompt_logprobs
        self._has_token_ids = bool(asked.return_token_ids)
        self._offsets: dict[int, int] = {}

    def chunk(self, batch: Sequence[ChoiceUpdate]) -> bytes:
        self._envelope.note(batch)
        return b"".join(map(self._frame, batch))

    def end(self) -> bytes:
        return self._envelope.last_frames()

    def failed(self, problem: Problem) -> bytes:
        return error_frames(problem)

    def whole(self) -> bytes:
        results = self._envelope.results
        return orjson.dumps(self._envelope.whole([self._choice(index, result) for index, result in enumerate(results)]))

    def _source(self, index: int) -> EchoedPrompt:
        return self._sources[index // self._envelope.num_per_prompt]

    def _choice(self, index: int, result: ChoiceResult) -> dict[str, Any]:
        source = self._source(index)
        scores = None
        if self._num_top is not None:
            scores = self._logprobs(index, result.token_ids, result.logprobs, result.prompt_logprobs)
        choice: dict[str, Any] = {
            "index": index,
            "text": source.text + result.text if self._has_echo else result.text,
            "logprobs": scores,
            "finish_reason": finish_reason(result.finish_reason),
            "stop_reason": result.stop_reason,
        }
        if self._num_prompt_top is not None and result.prompt_logprobs is not None:
            entries = with_top(result.prompt_logprobs, self._num_prompt_top)
            choice["prompt_logprobs"] = prompt_logprobs(self._tokenizer, entries)
        if self._has_token_ids:
            choice |= {"token_ids": result.token_ids, "prompt_token_ids": source.token_ids}
        return choice

    def _frame(self, update: ChoiceUpdate) -> bytes:
        is_first = update.index not in self._offsets
        source = self._source(update.index)
        text = source.text + update.text if self._has_echo and is_first else update.text
        scores = None
        if self._num_top is not None:
            scores = self._logprobs(update.index, update.token_ids, update.logprobs or (), update.prompt_logprobs)
        self._offsets.setdefault(update.index, 0)
        has_ids = self._has_token_ids and (is_first or update.token_ids)  # NOTE: the prompt's come first
        if not (text or update.finish_reason or has_ids or (update.token_ids and scores)):
            return b""
        choice: dict[str, Any] = {
            "index": update.index,
            "text": text,
            "logprobs": scores,
            "finish_reason": finish_reason(update.finish_reason),
        }
        if update.finish_reason is not None:
            choice["stop_reason"] = update.stop_reason
        if self._has_token_ids:
            choice["token_ids"] = update.token_ids
            if is_first:
                choice["prompt_token_ids"] = source.token_ids
        return frame(self._envelope.chunk([choice]))

    def _logprobs(
        self,
        index: int,
        token_ids: Sequence[int],
        entries: Sequence[TokenLogprobs],
        of_prompt: Sequence[TokenLogprobs | None] | None,
    ) -> dict[str, Any]:
        """The logprobs of these tokens; those of the prompt come first where the echo begins."""
        offset = self._offsets.get(index, 0)
        scored: Sequence[TokenLogprobs | None] = entries
        if self._has_echo and index not in self._offsets:
            token_ids = [*self._source(index).token_ids, *token_ids]
            scored = [*with_top(of_prompt or (), self._num_top or 0), *entries]
        value = completion_logprobs(self._tokenizer, token_ids, scored, offset)
        self._offsets[index] = offset + sum(map(len, value["tokens"]))
        return value


def _prompts(asked: CompletionBody) -> list[str | list[int]]:
    """The prompts of a body, as text or token ids."""
    given = asked.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        raise RequestError("prompt is empty; give text, token ids, or lists of them", param="prompt")
    # NOTE: all entries are of one kind, as was checked when the body was read.
    return cast(list[str | list[int]], [given] if isinstance(given[0], int) else given)
