"""Exchanges between ranks: the same bits for every number of ranks, and an end of every wait."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from tandem.compute.native.exchange import SharedExchange, make_memory, num_bytes
from tandem.core.errors import EngineStoppedError
from tests.helpers.exchanging import BUFFER_BYTES, exchange_and_check
from tests.helpers.native_kernels import load_or_skip


@pytest.fixture(autouse=True)
def _compiled() -> None:
    load_or_skip()


@contextmanager
def memory(num_ranks: int) -> Iterator[int]:
    descriptor = make_memory(num_ranks, BUFFER_BYTES)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def group(num_ranks: int, deadline_s: float = 30.0) -> list[SharedExchange]:
    """All ranks in this process."""
    with memory(num_ranks) as descriptor:
        return [
            SharedExchange(descriptor, rank, num_ranks, deadline_s=deadline_s, buffer_bytes=BUFFER_BYTES)
            for rank in range(num_ranks)
        ]


def test_processes_get_the_bits_of_a_fixed_tree() -> None:
    num_ranks = 2
    with memory(num_ranks) as descriptor:
        command = [sys.executable, "-m", "tests.helpers.exchanging", str(descriptor)]
        ranks = [
            subprocess.Popen([*command, str(rank), str(num_ranks)], pass_fds=[descriptor], stderr=subprocess.PIPE)
            for rank in range(num_ranks)
        ]
        ends = [rank.communicate(timeout=60) for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0] * num_ranks, ends


@pytest.mark.parametrize("num_ranks", [3, 4, 6, 7, 8, *(pytest.param(n, marks=pytest.mark.slow) for n in (11, 15, 16))])
def test_more_ranks_get_them_too(num_ranks: int) -> None:
    """In threads, which share no more than the memory. Stages and contexts may be three, so ranks any number."""
    with ThreadPoolExecutor(num_ranks) as pool:
        list(pool.map(lambda each: exchange_and_check(each, rounds=30), group(num_ranks)))


def test_a_rank_that_does_not_come_ends_the_wait_by_its_deadline() -> None:
    late, waiting = group(2, deadline_s=0.2)
    waiting.begin_step(41)
    with pytest.raises(
        EngineStoppedError, match=r"rank 0 of 2 did not .* within 0.2 s: step 41, exchange 1 of .*rank 1"
    ):
        waiting.add(torch.ones(1, 4), None, torch.float32)
    with pytest.raises(EngineStoppedError, match="rank 0 of 2"):  # NOTE: at once, and without a message of its own
        waiting.join(torch.ones(1, 2), [0, 2, 4])
    assert late.num_exchanges == 0


def test_the_end_of_a_group_ends_the_waits_of_its_ranks() -> None:
    lost, waiting, other = group(4)[:3]
    ended: list[str] = []

    def wait(rank: SharedExchange) -> None:
        with pytest.raises(EngineStoppedError) as error:
            rank.add(torch.ones(1, 4), None, torch.float32)
        ended.append(str(error.value))

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in (waiting, other)]
    for thread in threads:
        thread.start()
    lost.end()
    for thread in threads:
        thread.join(timeout=5)
    assert len(ended) == 2
    assert all("is lost" in words for words in ended)


def test_the_memory_has_no_name_and_no_other_size() -> None:
    with memory(2) as descriptor:
        assert os.fstat(descriptor).st_nlink == 0
        assert os.fstat(descriptor).st_size == num_bytes(2, BUFFER_BYTES)
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 1)
        assert not os.get_inheritable(descriptor)
