"""Lock file: prevents two processes of one machine from writing the same cache file at once."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PATIENCE_S = 1200.0  # longest wait for another process, which may be downloading a model
_POLL_S = 0.05


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock at `path` until the end of the block; waits for it first, for up to 20 minutes.

    Raises:
        OSError: another process has held it for all that time, or the file cannot be created.
    """
    give_up_s = time.monotonic() + _PATIENCE_S
    with path.open("w") as file:
        while not _lock(file.fileno()):
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"another process has held {path} for {_PATIENCE_S:g} s")
            time.sleep(_POLL_S)
        yield


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
