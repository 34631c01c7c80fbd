"""Link between a group's leader and another host: two authenticated connections, one for each direction of frames.

Ends when the other side is silent for too long or its certificate is withdrawn.
"""

import contextlib
import socket
import threading
from collections.abc import Callable

from tandem.core.errors import TransportError
from tandem.core.machine import monotonic_s
from tandem.ranks.frames import HEADER, Frame
from tandem.ranks.heartbeat import BEAT_S, SILENCE_S
from tandem.transport.tcp import wire

_SEND_S = 5.0  # without one byte taken
_PIECE_BYTES = 1 << 18  # after which the other side counts as heard
_CHECK_S = 1.0  # between two checks of the certificate


class Link:
    """One side of the link. One thread receives; any thread may send or close.

    Args:
        incoming, outgoing: an authenticated connection for each direction.
        is_accepted: whether the other side's certificate is still accepted.
        silence_s: after which the other side counts as lost.
    """

    def __init__(
        self,
        incoming: socket.socket,
        outgoing: socket.socket,
        is_accepted: Callable[[], bool],
        silence_s: float = SILENCE_S,
    ) -> None:
        self._incoming, self._outgoing, self._is_accepted = incoming, outgoing, is_accepted
        self._silence_s = silence_s
        self._lock = threading.Lock()
        wire.set_timeouts(incoming, receive_s=BEAT_S)
        wire.set_timeouts(outgoing, send_s=_SEND_S)
        self._heard_s = self._asked_s = self._checked_s = monotonic_s()

    def send(self, frame: Frame, payload: bytes | memoryview = b"") -> None:
        """Sends a frame. NOTE: a small one goes in one piece, which is one packet and one TLS record.

        Raises:
            OSError: the connection broke, or the other side takes nothing. The link has ended then, since the next
                frame would be read as the rest of this one.
        """
        assert frame.size == len(payload)
        header = frame.pack()
        with self._lock:
            try:
                if len(payload) <= 1 << 14:
                    self._outgoing.sendall(header + payload)
                else:
                    wire.send_all(self._outgoing, [memoryview(header), memoryview(payload)])
            except OSError:
                self.close()
                raise

    def receive(self) -> Frame:
        """The header of the next frame; receive its `size` bytes before the next call.

        Raises:
            TransportError: the other side has closed, or is silent, or its certificate was withdrawn.
            OSError: the connection broke.
        """
        frame = Frame.unpack(wire.receive(self._incoming, HEADER.size, self._tick))
        self._hear()
        return frame

    def receive_into(self, view: memoryview) -> None:
        """Receives the frame's bytes into `view`. Raises `TransportError` or `OSError` as `receive` does."""
        for start in range(0, len(view), _PIECE_BYTES):
            wire.receive_into(self._incoming, [view[start : start + _PIECE_BYTES]], self._tick)
            self._hear()

    def receive_bytes(self, size: int) -> bytes:
        """Receives the frame's bytes. Raises `TransportError` or `OSError` as `receive` does. NOTE: memory grows as
        bytes arrive, not as announced.
        """
        received = bytearray()
        while len(received) < size:
            piece = bytearray(min(_PIECE_BYTES, size - len(received)))
            self.receive_into(memoryview(piece))
            received += piece
        return bytes(received)

    def close(self) -> None:
        """Ends the link, also for threads that receive or send at the moment. Harmless if repeated."""
        for connection in (self._incoming, self._outgoing):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Frees both sockets; called by the thread that receives. Sends fail from then on."""
        self.close()
        self._incoming.close()
        with self._lock:
            self._outgoing.close()

    def _hear(self) -> None:
        self._heard_s = self._asked_s = monotonic_s()
        self._check(self._heard_s)

    def _tick(self) -> None:
        """Raises if the other side is silent. NOTE: if this process itself stood still, the other side's silence starts
        anew.
        """
        now_s = monotonic_s()
        if now_s - self._asked_s > SILENCE_S / 2:
            self._heard_s = now_s
        self._asked_s = now_s
        if now_s - self._heard_s >= self._silence_s:
            raise TransportError(f"it has been silent for {self._silence_s:g} s")
        self._check(now_s)

    def _check(self, now_s: float) -> None:
        if now_s - self._checked_s >= _CHECK_S:
            self._checked_s = now_s
            if not self._is_accepted():
                raise TransportError("its certificate is not accepted any more")
