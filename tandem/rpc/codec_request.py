"""Protobuf forms of what a request asks for and what is new of it: sampling options, outputs, timelines."""

import math
from collections.abc import Sequence

from tandem.core.errors import InvalidRequestError
from tandem.core.output import RequestMetrics, RequestOutput
from tandem.core.pins import MAX_PINS, Pin
from tandem.core.reasoning import Reasoning
from tandem.core.sampling_params import SamplingParams
from tandem.core.timeline import Stage
from tandem.core.types import FinishReason, TokenLogprobs
from tandem.rpc.form import Names, finite, maybe, maybe_finite, token_id, token_ids
from tandem.rpc.messages import GenerateNews
from tandem.rpc.v1 import worker_pb2 as pb

_FINISH_REASONS = Names(
    "finish_reason",
    {
        None: pb.FINISH_REASON_UNSPECIFIED,
        FinishReason.STOP: pb.FINISH_REASON_STOP,
        FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
        FinishReason.ABORT: pb.FINISH_REASON_ABORT,
        FinishReason.ERROR: pb.FINISH_REASON_ERROR,
        FinishReason.CONTENT_FILTER: pb.FINISH_REASON_CONTENT_FILTER,
    },
    newer=FinishReason.STOP,
)
_SCALARS = (
    *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("n", "logprobs", "prompt_logprobs", "include_stop_str_in_output", "ignore_eos", "grammar", "skip_special_tokens"),
)


def put_params(params: SamplingParams) -> pb.SamplingParams:
    message = pb.SamplingParams(
        **{name: getattr(params, name) for name in _SCALARS},
        logit_bias=params.logit_bias,
        allowed_token_ids=params.allowed_token_ids,
        bad_words=[pb.TokenIds(token_ids=word) for word in params.bad_words],
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        reasoning=_put_reasoning(params.reasoning),
    )
    if params.seed is not None:
        setattr(message, "seed" if params.seed >= 0 else "negative_seed", params.seed)
    return message


def take_params(message: pb.SamplingParams) -> SamplingParams:
    """NOTE: the values themselves are checked by `SamplingParams`."""
    given = {name: getattr(message, name) for name in _SCALARS if message.HasField(name)}
    seed_field = message.WhichOneof("given_seed")
    return SamplingParams(
        **given,
        logit_bias=dict(message.logit_bias),
        allowed_token_ids=tuple(message.allowed_token_ids) or None,
        bad_words=tuple(tuple(word.token_ids) for word in message.bad_words),
        seed=None if seed_field is None else getattr(message, seed_field),
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        reasoning=maybe(message, "reasoning", _take_reasoning),
    )


def _put_reasoning(reasoning: Reasoning | None) -> pb.Reasoning | None:
    if reasoning is None:
        return None
    return pb.Reasoning(
        start_token_ids=reasoning.start_token_ids,
        end_token_ids=reasoning.end_token_ids,
        is_open=reasoning.is_open,
        max_tokens=reasoning.max_tokens,
    )


def _take_reasoning(message: pb.Reasoning) -> Reasoning:
    return Reasoning(
        tuple(message.start_token_ids),
        tuple(message.end_token_ids),
        message.is_open,
        message.max_tokens if message.HasField("max_tokens") else None,
    )


def put_pin(pin: Pin) -> pb.Pin:
    return pb.Pin(num_tokens=pin.num_tokens, ttl_s=pin.ttl_s)


def take_pins(messages: Sequence[pb.Pin]) -> tuple[Pin, ...]:
    if len(messages) > MAX_PINS:
        raise InvalidRequestError(f"pins has {len(messages)} entries; at most {MAX_PINS} are accepted")
    return tuple(Pin(message.num_tokens, message.ttl_s) for message in messages)


def put_logprobs(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        token_id=logprobs.token_id,
        logprob=logprobs.logprob,
        rank=logprobs.rank,
        top_token_ids=[token for token, _ in logprobs.top],
        top_logprobs=[logprob for _, logprob in logprobs.top],
    )


def take_logprobs(message: pb.TokenLogprobs) -> TokenLogprobs:
    if len(message.top_token_ids) != len(message.top_logprobs):
        raise InvalidRequestError(
            f"top_logprobs has {len(message.top_logprobs)} entries for {len(message.top_token_ids)} token ids"
        )
    tops = zip(token_ids("top_token_ids", message.top_token_ids), message.top_logprobs, strict=True)
    return TokenLogprobs(
        token_id("token_id", message.token_id),
        _logprob(message.logprob),
        message.rank,
        tuple((token, _logprob(logprob)) for token, logprob in tops),
    )


def _logprob(value: float) -> float:
    """NOTE: minus infinity is the logarithm of no probability at all."""
    return value if value == -math.inf else finite("logprob", value)


def _put_positions(logprobs: tuple[TokenLogprobs, ...] | None) -> pb.TokenLogprobsList | None:
    return None if logprobs is None else pb.TokenLogprobsList(positions=map(put_logprobs, logprobs))


def _take_positions(message: pb.TokenLogprobsList) -> tuple[TokenLogprobs, ...]:
    return tuple(map(take_logprobs, message.positions))


def _put_prompt(logprobs: tuple[TokenLogprobs | None, ...] | None) -> pb.PromptLogprobs | None:
    if logprobs is None:
        return None
    return pb.PromptLogprobs(
        positions=[pb.PromptPosition(logprobs=None if one is None else put_logprobs(one)) for one in logprobs]
    )


def _take_prompt(message: pb.PromptLogprobs) -> tuple[TokenLogprobs | None, ...]:
    return tuple(maybe(position, "logprobs", take_logprobs) for position in message.positions)


def _put_metrics(metrics: RequestMetrics | None) -> pb.RequestMetrics | None:
    if metrics is None:
        return None
    return pb.RequestMetrics(
        arrival_s=metrics.arrival_s,
        first_scheduled_s=metrics.first_scheduled_s,
        first_token_s=metrics.first_token_s,
        last_token_s=metrics.last_token_s,
        num_prompt_tokens=metrics.num_prompt_tokens,
        num_output_tokens=metrics.num_output_tokens,
        num_cached_tokens=metrics.num_cached_tokens,
        num_preemptions=metrics.num_preemptions,
        pins=map(put_pin, metrics.pins),
    )


def _take_metrics(message: pb.RequestMetrics) -> RequestMetrics:
    return RequestMetrics(
        arrival_s=finite("arrival_s", message.arrival_s),
        first_scheduled_s=maybe_finite(message, "first_scheduled_s"),
        first_token_s=maybe_finite(message, "first_token_s"),
        last_token_s=maybe_finite(message, "last_token_s"),
        num_prompt_tokens=message.num_prompt_tokens,
        num_output_tokens=message.num_output_tokens,
        num_cached_tokens=message.num_cached_tokens,
        num_preemptions=message.num_preemptions,
        pins=take_pins(message.pins),
    )


def _put_output(output: RequestOutput) -> pb.RequestOutput:
    message = pb.RequestOutput(
        request_id=output.request_id,
        index=output.index,
        token_ids=output.token_ids,
        text=output.text,
        logprobs=_put_positions(output.logprobs),
        prompt_logprobs=_put_prompt(output.prompt_logprobs),
        finish_reason=_FINISH_REASONS.number(output.finish_reason),
        metrics=_put_metrics(output.metrics),
    )
    if isinstance(output.stop_reason, str):
        message.stop_text = output.stop_reason
    elif output.stop_reason is not None:
        message.stop_token_id = output.stop_reason
    return message


def _take_output(message: pb.RequestOutput) -> RequestOutput:
    stop_field = message.WhichOneof("stop_reason")
    return RequestOutput(
        request_id=message.request_id,
        index=message.index,
        token_ids=token_ids("token_ids", message.token_ids),
        text=message.text,
        logprobs=maybe(message, "logprobs", _take_positions),
        prompt_logprobs=maybe(message, "prompt_logprobs", _take_prompt),
        finish_reason=_FINISH_REASONS.word(message.finish_reason),
        stop_reason=None if stop_field is None else getattr(message, stop_field),
        metrics=maybe(message, "metrics", _take_metrics),
    )


def put_stage(stage: Stage) -> pb.Stage:
    return pb.Stage(
        name=stage.name,
        process=stage.process,
        start_s=stage.start_s,
        duration_s=stage.duration_s,
        attributes={name: _put_attribute(value) for name, value in stage.attributes.items()},
    )


def _put_attribute(value: str | int | float) -> pb.Attribute:
    if isinstance(value, str):
        return pb.Attribute(text=value)
    return pb.Attribute(integer=value) if isinstance(value, int) else pb.Attribute(number=value)


def take_stage(message: pb.Stage) -> Stage:
    return Stage(
        message.name,
        message.process,
        finite("start_s", message.start_s),
        finite("duration_s", message.duration_s),
        {name: _take_attribute(name, value) for name, value in message.attributes.items() if value.WhichOneof("value")},
    )


def _take_attribute(name: str, message: pb.Attribute) -> str | int | float:
    """NOTE: a value of a kind that only newer releases know looks as if there were none, and is left out."""
    return finite(name, message.number) if message.HasField("number") else getattr(message, message.WhichOneof("value"))


def put_generate_news(news: GenerateNews) -> pb.GenerateResponse:
    return pb.GenerateResponse(output=_put_output(news.output), timeline=map(put_stage, news.timeline))


def take_generate_news(message: pb.GenerateResponse) -> GenerateNews:
    if not message.HasField("output"):
        raise InvalidRequestError("output is missing in GenerateResponse")
    return GenerateNews(_take_output(message.output), tuple(map(take_stage, message.timeline)))
