"""Raises, and reports, the limit of files and sockets that this process may have open."""

import contextlib

_OTHER_FILES = 256  # of the process, beside sockets of connections


def allow_sockets(count: int) -> None:
    """Raise the limit of open files as far as permitted, for `count` connections and the process's other files."""
    try:
        import resource
    except ImportError:  # NOTE: systems without it have no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def allowed_sockets() -> int | None:
    """Number of connections that the limit of open files leaves beside the process's other files; None = no limit."""
    try:
        import resource
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else max(soft - _OTHER_FILES, soft // 2)
