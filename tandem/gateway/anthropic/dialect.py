"""`/v1/messages` and `/v1/messages/count_tokens`: a conversation through the model's template in, one message out."""

import orjson

from tandem.core.sampling_params import SamplingParams, validate_for_vocab
from tandem.gateway.anthropic.fields import MessagesBody, PromptBody, read_body
from tandem.gateway.anthropic.frames import error_body, status_of
from tandem.gateway.anthropic.prompt import read_prompt
from tandem.gateway.anthropic.writer import MessageWriter
from tandem.gateway.choices import expected_output, make_choices
from tandem.gateway.dialect import Asked, Surroundings
from tandem.gateway.errors import Problem
from tandem.gateway.request import ChoiceResult, ServeRequest
from tandem.rpc.messages import ModelInfo


class MessagesDialect:
    """Reads message bodies."""

    kind = "messages"

    def __init__(self, surroundings: Surroundings) -> None:
        self._around = surroundings

    async def read(self, body: bytes, request_id: str) -> Asked:
        """Raises as `Dialect.read`."""
        asked = read_body(MessagesBody, body)
        info = await self._around.directory.info()
        params = _params(asked, info)
        token_ids = await _encoded(asked, info, self._around)
        request = ServeRequest(
            request_id=request_id,
            model=info.name,
            choices=make_choices(request_id, [token_ids], params),
            num_expected_output=expected_output(params),
        )
        result = ChoiceResult(len(token_ids), keep=not asked.stream)
        writer = MessageWriter(f"msg_{request_id}", info.name, result, asked.max_tokens)
        return Asked(request, (result,), writer, bool(asked.stream))

    def problem(self, problem: Problem, request_id: str) -> tuple[int, bytes]:
        return status_of(problem), error_body(problem, request_id)


async def count_tokens(body: bytes, around: Surroundings) -> bytes:
    """The answer of `/v1/messages/count_tokens`: tokens that this prompt would have.

    Raises:
        InvalidRequestError: as for a message.
        UnavailableError: no worker is known.
    """
    asked = read_body(PromptBody, body)
    return orjson.dumps({"input_tokens": len(await _encoded(asked, await around.directory.info(), around))})


async def _encoded(asked: PromptBody, info: ModelInfo, around: Surroundings) -> list[int]:
    around.model.require(asked.model)
    prompt = await around.model.render(read_prompt(asked, around.limits.max_messages), {})
    return await around.model.encode(prompt, info.max_model_len, add_special_tokens=False)


def _params(asked: MessagesBody, info: ModelInfo) -> SamplingParams:
    """NOTE: warming the cache needs one token, which nobody is shown."""
    own = {"temperature": asked.temperature, "top_p": asked.top_p, "top_k": asked.top_k, "seed": asked.seed}
    said = {name: value for name, value in own.items() if value is not None}
    stop = tuple(asked.stop_sequences or ())
    params = SamplingParams(**{**info.sampling_defaults, **said, "max_tokens": max(1, asked.max_tokens), "stop": stop})
    validate_for_vocab(params, info.vocab_size)
    return params
