"""The limit of open files is raised as far as it may be."""

import subprocess
import sys


def test_many_sockets_are_allowed_up_to_the_hard_limit() -> None:
    code = (
        "import resource as r; from tandem.core.open_files import allow_sockets as allow, allowed_sockets as sockets\n"
        "limit = lambda: r.getrlimit(r.RLIMIT_NOFILE)[0]\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (64, 500))\n"
        "allow(100); print(limit(), sockets()); allow(10); print(limit()); allow(1 << 60); print(limit())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, num_sockets, second, third = map(int, done.stdout.split())
    assert first == second == 356
    assert num_sockets == 356 // 2, "few are left to the rest of the process"
    assert third == 500
