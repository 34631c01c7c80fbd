"""Protobuf forms of what travels on a stream that many requests share.

News of plain tokens is the hot path: it is read as four columns, without an object for each request.
"""

from itertools import accumulate

from tandem.core.errors import InvalidRequestError
from tandem.rpc.form import maybe, token_ids
from tandem.rpc.serve_messages import Delivery, Ending, Opening, Plain, Room, ServeCall, ServeNews
from tandem.rpc.v1 import worker_pb2 as pb


def put_serve_call(call: ServeCall) -> pb.ServeRequest:
    return pb.ServeRequest(
        openings=map(_put_opening, call.openings),
        rooms=[pb.Room(number=room.number, num_tokens=room.num_tokens) for room in call.rooms],
        left=call.left,
    )


def take_serve_call(message: pb.ServeRequest) -> ServeCall:
    return ServeCall(
        tuple(Opening(one.number, one.call, one.traceparent, one.room) for one in message.openings),
        tuple(Room(one.number, one.num_tokens) for one in message.rooms),
        tuple(message.left),
    )


def _put_opening(opening: Opening) -> pb.Opening:
    return pb.Opening(number=opening.number, call=opening.call, traceparent=opening.traceparent, room=opening.room)


def put_serve_news(news: ServeNews) -> pb.ServeResponse:
    return pb.ServeResponse(
        numbers=[item.number for item in news.plain],
        num_tokens=[len(item.token_ids) for item in news.plain],
        texts=[item.text for item in news.plain],
        token_ids=[token_id for item in news.plain for token_id in item.token_ids],
        others=map(_put_delivery, news.others),
    )


def take_serve_news(message: pb.ServeResponse) -> ServeNews:
    return ServeNews(_take_plain(message), tuple(map(_take_delivery, message.others)))


def _take_plain(message: pb.ServeResponse) -> tuple[Plain, ...]:
    numbers, counts, texts = message.numbers, list(message.num_tokens), message.texts
    ids = token_ids("token_ids", message.token_ids)
    if not len(numbers) == len(counts) == len(texts) or sum(counts) != len(ids):
        raise InvalidRequestError(
            f"ServeResponse has {len(numbers)} numbers with {len(counts)} counts and {len(texts)} texts, and "
            f"{len(ids)} token ids where the counts make {sum(counts)}"
        )
    ends = accumulate(counts)
    return tuple(
        Plain(number, ids[end - count : end], text)
        for number, count, end, text in zip(numbers, counts, ends, texts, strict=True)
    )


def _put_delivery(delivery: Delivery) -> pb.Delivery:
    ending = delivery.ending
    return pb.Delivery(
        number=delivery.number,
        news=delivery.news,
        ending=None if ending is None else pb.Ending(
            code=ending.code, details=ending.details, trailing=ending.trailing
        ),
    )  # fmt: skip


def _take_delivery(message: pb.Delivery) -> Delivery:
    return Delivery(message.number, message.news, maybe(message, "ending", _take_ending))


def _take_ending(message: pb.Ending) -> Ending:
    return Ending(message.code, message.details, dict(message.trailing))
