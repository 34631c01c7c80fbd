"""Ranks that the tests' process leads, as forks of a process that has imported what they need (`fork_server`)."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest

from tandem.ranks import rank_process
from tests.helpers.fork_server import SERVER, ForkedProcess

_STDERR = 2


@contextmanager
def forked_ranks() -> Iterator[None]:
    """Ranks that are started within are forks, where the system can do that."""
    with pytest.MonkeyPatch.context() as patch:
        if sys.platform.startswith("linux"):
            patch.setattr(rank_process, "start_process", _start_process)
        yield


def _start_process(descriptors: Sequence[int], environment: Mapping[str, str]) -> ForkedProcess:
    return SERVER.start("tandem.ranks.rank", (), environment, (), _STDERR, passed=descriptors)
