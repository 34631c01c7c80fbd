"""Probes half-closed connections, to tell clients that only ended their sending from clients that have left.

Only a write shows the difference. A client that left answers it with a reset, which ends the connection; one that waits
for its answer skips interim responses (RFC 9110 §15.2) and pings. Invariant: nothing is written inside a response's own
bytes.
"""

import asyncio

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

FIRST_DELAY_S = 0.1  # doubled each time: the first write causes the reset, the second meets it
MAX_DELAY_S = 15.0


class HalfCloseProbe:
    """Writes probes to a half-closed connection until its answer is sent or it is reset.

    Args:
        ping: bytes that a stream may send between two events; None: a response that has begun is not probed, since it
            is written in one piece.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        cycle: RequestResponseCycle,
        ping: bytes | None,
    ) -> None:
        self.ping = ping
        self._loop = loop
        self._transport = transport
        self._cycle = cycle
        self._delay_s = FIRST_DELAY_S

    def write(self) -> None:
        """Sends a probe and schedules the next one."""
        if self._cycle.response_complete or self._transport.is_closing():
            return
        if not self._cycle.response_started:
            self._transport.write(STATUS_LINE[100] + b"\r\n")
        elif self.ping is not None and self._cycle.chunked_encoding:
            self._transport.write(b"%x\r\n%b\r\n" % (len(self.ping), self.ping))
        self._loop.call_later(self._delay_s, self.write)
        self._delay_s = min(MAX_DELAY_S, 2 * self._delay_s)
