"""A TLS socket that reads into many buffers, bounds each wait, and may be shut down by any thread."""

import socket
import ssl
from collections.abc import Iterable, Sequence
from typing import Any


class EncryptedSocket(ssl.SSLSocket):
    """Socket that `SSLContext.wrap_socket` creates in `contexts`. One thread reads and writes; any may shut down.

    NOTE: a TLS record has at most 16 KiB, so each call of the library moves no more.
    """

    _receive_s: float | None = None
    _send_s: float | None = None

    def wait_at_most(self, *, receive_s: float, send_s: float) -> None:
        """Sets the timeouts of one wait for bytes and of one `sendall`; 0 = no timeout."""
        self._receive_s, self._send_s = receive_s or None, send_s or None

    def fill(self, views: Iterable[memoryview]) -> int:
        """Fills all views; returns the number of bytes, fewer when the wait timed out or the other side closed.

        Raises:
            BlockingIOError: the wait timed out before any byte arrived.
        """
        self.settimeout(self._receive_s)
        total = 0
        for view in views:
            while view:
                try:
                    num_bytes = self.recv_into(view)
                except TimeoutError as error:
                    if total:
                        return total
                    raise BlockingIOError("nothing came in time") from error
                if num_bytes == 0:
                    return total
                total += num_bytes
                view = view[num_bytes:]
        return total

    def sendall(self, data: Any, flags: int = 0) -> None:
        self.settimeout(self._send_s)
        super().sendall(data, flags)

    def shutdown(self, how: int) -> None:
        """Shuts the connection down, which wakes the thread that reads or writes.

        NOTE: the base class drops the TLS state first, after which a running read would return bytes that were neither
        decrypted nor authenticated.
        """
        socket.socket.shutdown(self, how)


def dns_names(connection: ssl.SSLSocket) -> Sequence[str]:
    """DNS names in the verified certificate of the peer."""
    certificate = connection.getpeercert() or {}
    entries: Any = certificate.get("subjectAltName", ())
    return [value for kind, value in entries if kind == "DNS"]
