"""Frames: format of all that a group's leader and another host send each other after the handshake (`rendezvous`).

A frame is a header and a number of bytes. Its `epoch` numbers the set of processes for which it was sent (one life of
the group's ranks); a frame of a former epoch is ignored.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

from tandem.core.errors import TransportError

HEADER = struct.Struct("!BBxxIQI")  # kind, rank, epoch, number, size
PLACE = struct.Struct("!BBBBB")  # first rank and number of ranks of the host; ranks, stages and contexts of the group
NUMBER = struct.Struct("!q")
MAX_MESSAGE_BYTES = 1 << 30  # after one header
MAX_REASON_BYTES = 1024  # of the text of `LOST`: the reason why a rank has ended


class FrameKind(IntEnum):
    """Kind of a frame. Kinds below 16 are sent by both sides, those below 32 by the leader only, others by
    hosts only.
    """

    PUBLISH = 1  # bytes of exchange `number` on lane `rank` of `LinksMirror`
    MESSAGE = 2  # a message (`messages`) to or from `rank`
    BEATS = 3  # a count for each rank, of which the sender's own ranks are right

    PLACE = 16  # which ranks the host has, see `PLACE`
    KV = 17  # `number`: size of the memory for KV, in bytes
    BEGIN = 18  # start the ranks of `epoch`
    KILL = 19  # `rank`
    END = 20  # end the ranks of `epoch`
    KV_CALL = 21  # call `number`, see `kv_messages`; of no epoch

    STARTED = 32  # process ids, a `NUMBER` each
    LOST = 33  # `rank` has ended; words that say how
    ENDED = 34  # no rank of `epoch` is left
    LEAVING = 35  # this host is to be stopped, once its ranks are not needed
    KV_ANSWER = 36  # an answer to call `number`


@dataclass(frozen=True, slots=True)
class Frame:
    """Header of a frame. `size`: number of bytes that follow. `rank` and `number` mean what the comment of the kind
    says; 0 where they mean nothing.
    """

    kind: FrameKind
    rank: int = 0
    epoch: int = 0
    number: int = 0
    size: int = 0

    def pack(self) -> bytes:
        """Encodes the header."""
        return HEADER.pack(self.kind, self.rank, self.epoch, self.number, self.size)

    @classmethod
    def unpack(cls, data: bytes) -> "Frame":
        """Parses a header. Raises `TransportError` if it is none of this protocol."""
        kind, rank, epoch, number, size = HEADER.unpack(data)
        if kind not in FrameKind._value2member_map_ or size > MAX_MESSAGE_BYTES:
            raise TransportError(f"a frame of kind {kind} with {size} bytes is none of this protocol")
        return cls(FrameKind(kind), rank, epoch, number, size)
