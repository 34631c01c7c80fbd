"""Watches sockets for the end of the process at the other end, without reading from them; also calls a function
regularly.
"""

import select
import socket
import threading
from collections.abc import Callable, Sequence

_HANGUP = select.POLLRDHUP | select.POLLHUP | select.POLLERR


def watch_for_hangup(
    descriptors: Sequence[int],
    on_hangup: Callable[[int], None],
    *,
    on_time: Callable[[], None] | None = None,
    every_s: float | None = None,
) -> Callable[[], None]:
    """Starts a thread that calls `on_hangup` once for each of `descriptors` whose other end is closed, and `on_time`
    about every `every_s` seconds.

    Returns a function that ends the thread; the caller keeps the descriptors open until it has called that.
    """
    ours, theirs = socket.socketpair()
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, _HANGUP)
    poll.register(theirs, _HANGUP)

    def watch() -> None:
        with ours, theirs:  # NOTE: so that both live as long as the thread, whether or not the caller can stop it
            while True:
                if on_time is not None:
                    on_time()
                for descriptor, _ in poll.poll(None if every_s is None else every_s * 1000):
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
