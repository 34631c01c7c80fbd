"""`/v1/chat/completions`: messages through the model's template in, one message a choice out.

Streams: the first chunk of a choice carries its role and empty content, text follows, the last has its finish reason;
usage comes in a chunk without choices.
"""

from collections.abc import Sequence
from typing import Any

import orjson

from tandem.gateway.choices import check_num_choices, expected_output, make_choices
from tandem.gateway.dialect import Asked, Surroundings
from tandem.gateway.errors import Problem, RequestError
from tandem.gateway.openai.envelope import Envelope
from tandem.gateway.openai.fields import ChatBody, read_body
from tandem.gateway.openai.frames import error_body, error_frames, frame
from tandem.gateway.openai.logprobs import chat_logprobs, prompt_logprobs
from tandem.gateway.openai.messages import read_messages
from tandem.gateway.openai.sampling import read_params
from tandem.gateway.openai.usage import finish_reason
from tandem.gateway.request import ChoiceResult, ChoiceUpdate, ServeRequest
from tandem.text.tokenizer import Tokenizer


class ChatDialect:
    """Reads chat bodies."""

    kind = "chat"

    def __init__(self, surroundings: Surroundings) -> None:
        self._around = surroundings

    async def read(self, body: bytes, request_id: str) -> Asked:
        """Raises as `Dialect.read`."""
        asked, model = read_body(ChatBody, body), self._around.model
        model.require(asked.model)
        check_num_choices(1, asked.n, self._around.limits.max_choices)
        messages = read_messages(asked.messages, self._around.limits.max_messages)
        info = await self._around.directory.info()
        params = read_params(asked, info, model.tokenizer, max_tokens=_max_tokens(asked), logprobs=_num_logprobs(asked))
        prompt = await model.render(messages, _variables(asked))
        token_ids = await model.encode(prompt, info.max_model_len, add_special_tokens=bool(asked.add_special_tokens))
        request = ServeRequest(
            request_id=request_id,
            model=model.name,
            choices=make_choices(request_id, [token_ids], params),
            num_expected_output=expected_output(params),
            priority=asked.priority or 0,
            cache_salt=asked.cache_salt or "",
            session_id=asked.prompt_cache_key,
            local_prefill=params.prompt_logprobs is not None,
        )
        is_stream = bool(asked.stream)
        results = tuple(ChoiceResult(len(token_ids), keep=not is_stream) for _ in request.choices)
        envelope = Envelope.of(asked, f"chatcmpl-{request_id}", "chat.completion", info, results, params.n)
        return Asked(request, results, ChatWriter(envelope, asked, model.tokenizer, token_ids), is_stream)

    def problem(self, problem: Problem, request_id: str) -> tuple[int, bytes]:
        return problem.status, error_body(problem)


class ChatWriter:
    """Writes one chat answer."""

    def __init__(
        self, envelope: Envelope, asked: ChatBody, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]
    ) -> None:
        self._envelope = envelope
        self._tokenizer = tokenizer
        self._num_top = (asked.top_logprobs or 0) if asked.logprobs else None
        self._prompt_token_ids = prompt_token_ids if asked.return_token_ids else None
        self._begun: set[int] = set()

    def chunk(self, batch: Sequence[ChoiceUpdate]) -> bytes:
        return b"".join(map(self._frames, batch))

    def end(self) -> bytes:
        return self._envelope.last_frames()

    def failed(self, problem: Problem) -> bytes:
        return error_frames(problem)

    def whole(self) -> bytes:
        results = self._envelope.results
        value = self._envelope.whole([self._choice(index, result) for index, result in enumerate(results)])
        if results[0].prompt_logprobs is not None:
            value["prompt_logprobs"] = prompt_logprobs(self._tokenizer, results[0].prompt_logprobs)
        if self._prompt_token_ids is not None:
            value["prompt_token_ids"] = self._prompt_token_ids
        return orjson.dumps(value)

    def _choice(self, index: int, result: ChoiceResult) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": result.text, "refusal": None},
            "logprobs": None if self._num_top is None else self._logprobs(result.logprobs),
            "finish_reason": finish_reason(result.finish_reason),
            "stop_reason": result.stop_reason,
        }
        return choice if self._prompt_token_ids is None else choice | {"token_ids": result.token_ids}

    def _frames(self, news: ChoiceUpdate) -> bytes:
        is_worth_it = news.text or news.finish_reason or (news.token_ids and self._shows_tokens)
        text = self._frame(news) if is_worth_it else b""
        if news.index in self._begun:
            return text
        self._begun.add(news.index)
        first: dict[str, Any] = {"index": news.index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
        value = self._envelope.chunk([first | {"finish_reason": None}])
        if self._prompt_token_ids is not None:
            value["prompt_token_ids"] = self._prompt_token_ids
        return frame(value) + text

    @property
    def _shows_tokens(self) -> bool:
        return self._num_top is not None or self._prompt_token_ids is not None

    def _frame(self, news: ChoiceUpdate) -> bytes:
        choice: dict[str, Any] = {
            "index": news.index,
            "delta": {"content": news.text} if news.text or self._shows_tokens else {},
            "logprobs": None if self._num_top is None else self._logprobs(news.logprobs or ()),
            "finish_reason": finish_reason(news.finish_reason),
        }
        if news.finish_reason is not None:
            choice["stop_reason"] = news.stop_reason
        if self._prompt_token_ids is not None:
            choice["token_ids"] = news.token_ids
        return frame(self._envelope.chunk([choice]))

    def _logprobs(self, entries: Sequence[Any]) -> dict[str, Any]:
        return chat_logprobs(self._tokenizer, entries, self._num_top or 0)


def _max_tokens(asked: ChatBody) -> int | None:
    """The newer name wins; both are taken when they agree."""
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


def _variables(asked: ChatBody) -> dict[str, Any]:
    """What the template sees besides the messages."""
    variables = dict(asked.chat_template_kwargs or {})
    for name in ("tools", "documents", "messages"):
        if name in variables:
            raise RequestError(f"chat_template_kwargs may not hold {name}", param="chat_template_kwargs")
    if asked.add_generation_prompt is not None:
        variables["add_generation_prompt"] = asked.add_generation_prompt
    return variables
