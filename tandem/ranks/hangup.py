"""Tells when the process at the other end of a socket has ended, without reading from it."""

import select
import socket
import threading
from collections.abc import Callable, Sequence

_HANGUP = select.POLLRDHUP | select.POLLHUP | select.POLLERR


def watch_for_hangup(descriptors: Sequence[int], on_hangup: Callable[[int], None]) -> Callable[[], None]:
    """Calls `on_hangup` once for each of `descriptors` whose other end is closed, on a thread of its own.

    The caller keeps them open until it has called what this returns, which ends the thread.
    """
    ours, theirs = socket.socketpair()
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, _HANGUP)
    poll.register(theirs, _HANGUP)

    def watch() -> None:
        with ours, theirs:  # NOTE: so that both live as long as the thread, whether or not the caller can stop it
            while True:
                for descriptor, _ in poll.poll():
                    if descriptor == theirs.fileno():
                        return
                    poll.unregister(descriptor)
                    on_hangup(descriptor)

    thread = threading.Thread(target=watch, name="tandem-ranks", daemon=True)
    thread.start()

    def stop() -> None:
        ours.shutdown(socket.SHUT_RDWR)
        if thread is not threading.current_thread():
            thread.join()

    return stop
