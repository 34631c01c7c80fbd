"""Protobuf forms of the calls to a worker and their answers."""

from collections.abc import Sequence

from tandem.core.errors import InvalidRequestError
from tandem.kvcache.block_table import BlockRange
from tandem.rpc.codec_common import (
    maybe_address,
    put_address,
    put_maybe_address,
    put_scope,
    take_address,
    take_scope,
)
from tandem.rpc.codec_request import (
    put_logprobs,
    put_params,
    put_pin,
    put_stage,
    take_logprobs,
    take_params,
    take_pins,
    take_stage,
)
from tandem.rpc.form import (
    maybe,
    not_empty,
    not_negative,
    pack_hashes,
    pack_token_ids,
    required,
    token_id,
    unpack_hashes,
    unpack_token_ids,
)
from tandem.rpc.messages import (
    ChosenToken,
    ConfirmAnswer,
    ConfirmCall,
    GenerateCall,
    Greeting,
    LeaseCall,
    LeaseNews,
    PrefillCall,
    PrefillNews,
)
from tandem.rpc.v1 import worker_pb2 as pb

_MIN_INTERVAL_S = 0.001
_MAX_INTERVAL_S = 3600.0


def put_interval(interval_s: float) -> pb.WatchRequest:
    return pb.WatchRequest(interval_s=interval_s)


def take_interval(message: pb.WatchRequest) -> float:
    if not _MIN_INTERVAL_S <= message.interval_s <= _MAX_INTERVAL_S:
        raise InvalidRequestError(
            f"interval_s={message.interval_s} cannot be kept; use {_MIN_INTERVAL_S} to {_MAX_INTERVAL_S} seconds"
        )
    return message.interval_s


def put_generate_call(call: GenerateCall) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=call.request_id,
        prompt_token_ids=pack_token_ids(call.prompt_token_ids),
        params=put_params(call.params),
        output_token_ids=pack_token_ids(call.output_token_ids),
        priority=call.priority,
        scope=put_scope(call.scope),
        decode=put_maybe_address(call.decode),
        prefill=put_maybe_address(call.prefill),
        spares=map(put_address, call.spares),
        fetch_from=put_maybe_address(call.fetch_from),
        num_fetch_blocks=call.num_fetch_blocks,
        pins=map(put_pin, call.pins),
    )


def take_generate_call(message: pb.GenerateRequest) -> GenerateCall:
    return GenerateCall(
        request_id=not_empty("request_id", message.request_id),
        prompt_token_ids=tuple(unpack_token_ids("prompt_token_ids", message.prompt_token_ids, least=1)),
        params=take_params(required(message, "params")),
        output_token_ids=tuple(unpack_token_ids("output_token_ids", message.output_token_ids)),
        priority=message.priority,
        scope=take_scope(required(message, "scope")),
        decode=maybe_address(message, "decode"),
        prefill=maybe_address(message, "prefill"),
        spares=tuple(map(take_address, message.spares)),
        fetch_from=maybe_address(message, "fetch_from"),
        num_fetch_blocks=message.num_fetch_blocks,
        pins=take_pins(message.pins),
    )


def put_prefill_call(call: PrefillCall) -> pb.PrefillRequest:
    return pb.PrefillRequest(
        request_id=call.request_id,
        reader=put_address(call.reader),
        prompt_token_ids=pack_token_ids(call.prompt_token_ids),
        params=put_params(call.params),
        output_token_ids=pack_token_ids(call.output_token_ids),
        priority=call.priority,
        scope=put_scope(call.scope),
        prefill=put_maybe_address(call.prefill),
        fetch_from=put_maybe_address(call.fetch_from),
        num_fetch_blocks=call.num_fetch_blocks,
        lease_id=call.lease_id,
        pins=map(put_pin, call.pins),
    )


def take_prefill_call(message: pb.PrefillRequest) -> PrefillCall:
    return PrefillCall(
        request_id=not_empty("request_id", message.request_id),
        reader=take_address(required(message, "reader")),
        prompt_token_ids=tuple(unpack_token_ids("prompt_token_ids", message.prompt_token_ids, least=1)),
        params=take_params(required(message, "params")),
        output_token_ids=tuple(unpack_token_ids("output_token_ids", message.output_token_ids)),
        priority=message.priority,
        scope=take_scope(required(message, "scope")),
        prefill=maybe_address(message, "prefill"),
        fetch_from=maybe_address(message, "fetch_from"),
        num_fetch_blocks=message.num_fetch_blocks,
        lease_id=message.lease_id,
        pins=take_pins(message.pins),
    )


def put_lease(lease: LeaseNews) -> pb.LeaseNews:
    return pb.LeaseNews(
        lease_id=lease.lease_id,
        num_tokens=lease.num_tokens,
        groups=[pb.BlockRange(first_index=one.first_index, block_ids=one.block_ids) for one in lease.groups],
        is_last=lease.is_last,
        ttl_s=lease.ttl_s,
    )


def take_lease(message: pb.LeaseNews) -> LeaseNews:
    return LeaseNews(
        lease_id=message.lease_id,
        num_tokens=message.num_tokens,
        groups=tuple(BlockRange(one.first_index, tuple(one.block_ids)) for one in message.groups),
        is_last=message.is_last,
        ttl_s=not_negative("ttl_s", message.ttl_s),
    )


def _put_chosen(chosen: ChosenToken) -> pb.ChosenToken:
    logprobs = None if chosen.logprobs is None else put_logprobs(chosen.logprobs)
    return pb.ChosenToken(token_id=chosen.token_id, logprobs=logprobs)


def _take_chosen(message: pb.ChosenToken) -> ChosenToken:
    return ChosenToken(token_id("token_id", message.token_id), maybe(message, "logprobs", take_logprobs))


def put_prefill_news(news: PrefillNews) -> pb.PrefillResponse:
    return pb.PrefillResponse(
        lease=None if news.lease is None else put_lease(news.lease),
        token=None if news.token is None else _put_chosen(news.token),
        num_cached_tokens=news.num_cached_tokens,
        timeline=map(put_stage, news.timeline),
        pins=map(put_pin, news.pins),
    )


def take_prefill_news(message: pb.PrefillResponse) -> PrefillNews:
    return PrefillNews(
        lease=maybe(message, "lease", take_lease),
        token=maybe(message, "token", _take_chosen),
        num_cached_tokens=message.num_cached_tokens if message.HasField("num_cached_tokens") else None,
        timeline=tuple(map(take_stage, message.timeline)),
        pins=take_pins(message.pins),
    )


def put_greeting(greeting: Greeting) -> pb.Greeting:
    return pb.Greeting(
        worker=put_address(greeting.worker),
        epoch=greeting.epoch,
        protocol_version=greeting.protocol_version,
        compatibility=greeting.compatibility,
        site={name: _put_site_field(value) for name, value in greeting.site.items()},
        cards=greeting.cards,
        num_blocks=greeting.num_blocks,
    )


def _put_site_field(value: str | bool) -> pb.SiteField:
    return pb.SiteField(text=value) if isinstance(value, str) else pb.SiteField(flag=value)


def take_greeting(message: pb.Greeting) -> Greeting:
    return Greeting(
        worker=take_address(required(message, "worker")),
        epoch=message.epoch,
        protocol_version=message.protocol_version,
        compatibility=dict(message.compatibility),
        site={name: _take_site_field(value) for name, value in message.site.items() if value.WhichOneof("value")},
        cards=dict(message.cards),
        num_blocks=message.num_blocks,
    )


def _take_site_field(message: pb.SiteField) -> str | bool:
    """NOTE: a value of a kind that only newer releases know looks as if there were none, and is left out."""
    return message.text if message.HasField("text") else message.flag


def put_lease_call(call: LeaseCall) -> pb.LeaseRequest:
    return pb.LeaseRequest(
        reader=put_address(call.reader), lease_id=call.lease_id, block_hashes=pack_hashes(call.block_hashes)
    )


def take_lease_call(message: pb.LeaseRequest) -> LeaseCall:
    return LeaseCall(
        reader=take_address(required(message, "reader")),
        lease_id=not_empty("lease_id", message.lease_id),
        block_hashes=unpack_hashes("block_hashes", message.block_hashes),
    )


def put_renew(lease_ids: Sequence[str]) -> pb.RenewRequest:
    return pb.RenewRequest(lease_ids=lease_ids)


def put_renew_answer(lease_ids: Sequence[str]) -> pb.RenewResponse:
    return pb.RenewResponse(invalid_lease_ids=lease_ids)


def put_release(lease_ids: Sequence[str]) -> pb.ReleaseRequest:
    return pb.ReleaseRequest(lease_ids=lease_ids)


def put_confirm_call(call: ConfirmCall) -> pb.ConfirmRequest:
    return pb.ConfirmRequest(lease_id=call.lease_id, checksum_block_ids=call.checksum_block_ids)


def take_confirm_call(message: pb.ConfirmRequest) -> ConfirmCall:
    return ConfirmCall(
        lease_id=not_empty("lease_id", message.lease_id), checksum_block_ids=tuple(message.checksum_block_ids)
    )


def put_confirm_answer(answer: ConfirmAnswer) -> pb.ConfirmResponse:
    return pb.ConfirmResponse(is_valid=answer.is_valid, checksums=answer.checksums)


def take_confirm_answer(message: pb.ConfirmResponse) -> ConfirmAnswer:
    return ConfirmAnswer(message.is_valid, tuple(message.checksums))
