"""Messages as a process of the previous release sends and reads them: without fields that are newer.

Such a process speaks the same protocol versions as this release. If a scenario has one, all others count as the next
release and speak one version more.
"""

from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message

from tandem.rpc.protocols import PROTOCOL_VERSION, SPOKEN
from tandem.rpc.v1 import worker_pb2

PREVIOUS_SPOKEN = SPOKEN
NEXT_SPOKEN = (PROTOCOL_VERSION, PROTOCOL_VERSION + 1)
NEWER: Mapping[str, tuple[str, ...]] = {  # fields by message; a test compares them with the release before
    "WorkerState": ("request_bytes", "names_states"),
    "WorkerStatus": ("usage", "drafts", "ranks"),
    "PairRequest": ("told", "place", "pairing_id"),
    "SettleRequest": ("pairing_id",),
    "DescribeResponse": ("usage",),
    "WorkerRecord": ("epoch",),
    "SamplingParams": ("speculate",),
    "GenerateRequest": ("told",),
    "RequestMetrics": ("drafts",),
    "BlockRange": ("page_ids",),
    "PrefillRequest": ("drafter", "told"),
    "PrefillResponse": ("draft_state",),
    "ConfirmRequest": ("reader_ranks", "reader_stages"),
}
_WITHIN: Mapping[tuple[str, str], type[Message]] = {  # messages that are sent as bytes of another
    ("RequestStart", "call"): worker_pb2.GenerateRequest,
    ("OtherUpdate", "update"): worker_pb2.GenerateResponse,
}


def as_previous_release(message_type: type[Message], data: bytes) -> bytes:
    """The bytes of a message without the fields that the previous release does not know."""
    message = message_type.FromString(data)
    _clear(message)
    return message.SerializeToString(deterministic=True)


def _clear(message: Message) -> None:
    name = message.DESCRIPTOR.name
    for newer in NEWER.get(name, ()):
        message.ClearField(newer)
    for field, value in message.ListFields():
        inner = _WITHIN.get((name, field.name))
        if inner is not None:
            setattr(message, field.name, as_previous_release(inner, value))
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for each in _each(value):
                _clear(each)


def _each(value: Any) -> list[Message]:
    return [value] if isinstance(value, Message) else list(value)
