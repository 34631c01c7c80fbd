"""Hand-written wire conversions (`form.Form`) of values whose protobuf message has another structure.

Text updates are the hot path: a message has them as four columns, so no message object is needed for each request.
"""

import math
from itertools import accumulate

from tandem.core.errors import InvalidRequestError
from tandem.core.events import BlockEvent, BlockRemoved, BlockStored
from tandem.core.hashing import HASH_BYTES
from tandem.core.types import TokenLogprobs
from tandem.rpc.form import Form, finite, token_id, token_ids
from tandem.rpc.serve_messages import OtherUpdate, ServeUpdate, TextUpdate
from tandem.rpc.v1 import router_pb2, worker_pb2


def serve_update_form(other: Form[OtherUpdate]) -> Form[ServeUpdate]:
    """Form of `ServeUpdate`; `other` is the form of the entries of its `others`."""

    def put(update: ServeUpdate) -> worker_pb2.ServeResponse:
        return worker_pb2.ServeResponse(
            numbers=[item.number for item in update.plain],
            num_tokens=[len(item.token_ids) for item in update.plain],
            texts=[item.text for item in update.plain],
            token_ids=[token_id for item in update.plain for token_id in item.token_ids],
            others=[other.put(item) for item in update.others],  # type: ignore[misc]
        )

    def take(message: worker_pb2.ServeResponse) -> ServeUpdate:
        return ServeUpdate(_take_plain(message), tuple(map(other.take, message.others)))

    return Form(worker_pb2.ServeResponse, put, take)


def _take_plain(message: worker_pb2.ServeResponse) -> tuple[TextUpdate, ...]:
    numbers, counts, texts = message.numbers, list(message.num_tokens), message.texts
    ids = token_ids("token_ids", message.token_ids)
    if not len(numbers) == len(counts) == len(texts) or sum(counts) != len(ids):
        raise InvalidRequestError(
            f"ServeResponse has {len(numbers)} numbers with {len(counts)} counts and {len(texts)} texts, and "
            f"{len(ids)} token ids where the counts make {sum(counts)}"
        )
    ends = accumulate(counts)
    return tuple(
        TextUpdate(number, ids[end - count : end], text)
        for number, count, end, text in zip(numbers, counts, ends, texts, strict=True)
    )


def _put_logprobs(logprobs: TokenLogprobs) -> worker_pb2.TokenLogprobs:
    return worker_pb2.TokenLogprobs(
        token_id=logprobs.token_id,
        logprob=logprobs.logprob,
        rank=logprobs.rank,
        top_token_ids=[token for token, _ in logprobs.top],
        top_logprobs=[logprob for _, logprob in logprobs.top],
    )


def _take_logprobs(message: worker_pb2.TokenLogprobs) -> TokenLogprobs:
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
    """Checks a received logarithm of a probability. NOTE: minus infinity is valid; it stands for probability 0."""
    return value if value == -math.inf else finite("logprob", value)


def _put_event(event: BlockEvent) -> router_pb2.BlockEvent:
    if isinstance(event, BlockRemoved):
        return router_pb2.BlockEvent(block_hash=event.block_hash, group=event.group, is_removed=True)
    return router_pb2.BlockEvent(block_hash=event.block_hash, parent_hash=event.parent_hash, group=event.group)


def _take_event(message: router_pb2.BlockEvent) -> BlockEvent:
    block_hash = _block_hash("block_hash", message.block_hash)
    if message.is_removed:
        return BlockRemoved(block_hash, message.group)
    parent = _block_hash("parent_hash", message.parent_hash) if message.HasField("parent_hash") else None
    return BlockStored(block_hash, parent, message.group)


def _block_hash(field: str, data: bytes) -> bytes:
    if len(data) != HASH_BYTES:
        raise InvalidRequestError(f"{field} has {len(data)} bytes; a block hash has {HASH_BYTES}")
    return data


TOKEN_LOGPROBS: Form[TokenLogprobs] = Form(worker_pb2.TokenLogprobs, _put_logprobs, _take_logprobs)
BLOCK_EVENT: Form[BlockEvent] = Form(router_pb2.BlockEvent, _put_event, _take_event)
