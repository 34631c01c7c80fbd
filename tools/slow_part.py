"""Runs a small part of the slow tests, another for each commit: `make test-part`, or `make test-part COMMIT=...`.

The commit's hash chooses a room, and in it the tests. A commit is thereby always given the same tests.
"""

import argparse
import hashlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
NUM_TESTS = 12  # NOTE: of 2 to 20 s each, on two cores: at most some three minutes with the start
TIMEOUT_S = 120  # of a test
MARKS = "slow and not timeout"  # what has a timeout of its own takes minutes
NUM_LONG_TESTS = {"tests/skew": 2, "tests/simulation": 1}  # of rooms whose tests all have one, and take a minute or two
NUM_TESTS_OF = {"tests/e2e": 6, **NUM_LONG_TESTS}  # of rooms whose tests take longer
ROOMS = (
    "tests/contract",
    "tests/e2e",
    "tests/e2e/test_same_tokens.py",
    "tests/faults",
    "tests/golden",
    "tests/simulation",
    "tests/skew",
    "tests/unit/compute",
    "tests/unit/engine",
    "tests/unit/models",
    "tests/unit/ranks",
    "tests/unit/worker",
)


def room_of(commit: str, rooms: Sequence[str] = ROOMS) -> str:
    return rooms[int(_digest(commit), 16) % len(rooms)]


def marks_of(room: str) -> str:
    """The marks of the room's tests that may be run."""
    return "slow" if room in NUM_LONG_TESTS else MARKS


def chosen(commit: str, node_ids: Sequence[str], num_tests: int = NUM_TESTS) -> list[str]:
    """At most `num_tests` of the tests, in their order."""
    first = set(sorted(node_ids, key=lambda node_id: _digest(f"{commit} {node_id}"))[:num_tests])
    return [node_id for node_id in node_ids if node_id in first]


def collected(room: str, root: Path) -> list[str]:
    """Node ids of a room's slow tests, but for those of rooms within it, and except in `NUM_LONG_TESTS` for those with
    a timeout of their own.

    Raises:
        SystemExit: they cannot be collected, or there are none.
    """
    command = [*_pytest(), "-m", marks_of(room), "--collect-only", "-q", "--no-header", room]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    within = tuple(other for other in ROOMS if other.startswith(f"{room}/"))
    lines = [line for line in done.stdout.splitlines() if line.startswith("tests/") and "::" in line]
    node_ids = [line for line in lines if not line.startswith(within)]
    if done.returncode or not node_ids:
        raise SystemExit(f"{done.stdout}{done.stderr}\n{room}: its slow tests cannot be collected, or there are none")
    return node_ids


def run(commit: str, rooms: Sequence[str], root: Path, options: Sequence[str] = ()) -> int:
    """Runs the part of a commit with further options of pytest; returns pytest's exit code."""
    room = room_of(commit, rooms)
    node_ids = collected(room, root)
    part = chosen(commit, node_ids, NUM_TESTS_OF.get(room, NUM_TESTS))
    print(f"{len(part)} of {len(node_ids)} slow tests of {room}; again: make test-part COMMIT={commit}", flush=True)
    command = [*_pytest(), "-m", marks_of(room), f"--timeout={TIMEOUT_S}", *options, *part]
    return subprocess.run(command, cwd=root).returncode


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _pytest() -> list[str]:
    return [sys.executable, "-m", "pytest"]


def _resolved(commit: str) -> str:
    command = ["git", "rev-parse", "--verify", f"{commit}^{{commit}}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"--commit={commit} is not a commit of this repository: name another, or leave it out for HEAD"
        )
    return done.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default="HEAD", help="commit whose part is run")
    known, options = parser.parse_known_args()
    return run(_resolved(known.commit), ROOMS, ROOT, options)


if __name__ == "__main__":
    sys.exit(main())
