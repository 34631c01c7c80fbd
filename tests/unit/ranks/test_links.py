"""Lanes between hosts: readers of what ranks of one host publish, and a pipe between two hosts that loses no byte."""

import os
import threading

import pytest
import torch

from tandem.compute.native.links import SharedLinks
from tandem.compute.native.links_layout import make_links_memory
from tandem.compute.native.links_mirror import HostPlace, LinksMirror
from tandem.ranks.forwarding import forward
from tests.helpers.native_kernels import load_or_skip

SIZES = [(1, 2, 1, 2), (2, 2, 1, 2), (1, 4, 1, 2), (1, 4, 1, 4), (1, 2, 2, 2), (2, 4, 1, 4), (8, 2, 1, 2), (2, 4, 2, 4)]
"""Ranks of a section, stages, contexts, and hosts."""


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    load_or_skip()


def places(width: int, num_stages: int, num_contexts: int, num_hosts: int) -> list[HostPlace]:
    num_ranks = width * num_stages * num_contexts
    here = num_ranks // num_hosts
    return [HostPlace(host * here, here, num_ranks, num_stages, num_contexts) for host in range(num_hosts)]


@pytest.mark.parametrize("sizes", SIZES)
def test_hosts_pass_on_what_others_read_and_nothing_else(sizes: tuple[int, int, int, int]) -> None:
    """All ranks read what each publishes for all; of pipes the other end alone, if it is elsewhere."""
    width, num_stages, num_contexts, num_hosts = sizes
    found = places(*sizes)
    assert all(place.is_possible for place in found[1:])
    num_ranks = found[0].num_ranks
    memory = make_links_memory(num_ranks, num_stages * num_contexts)
    try:
        mirror = LinksMirror(memory, found[0])
    finally:
        os.close(memory)
    lanes = [mirror.lanes_of(place.ranks) for place in found]
    assert len({lane for own in lanes for lane in own}) == sum(map(len, lanes))
    pipes = {lane for own in lanes for lane in own if lane >= num_ranks}
    assert len(pipes) == 2 * (num_hosts - 1) * width * num_contexts
    for host, own in enumerate(lanes):
        for lane in own:
            readers = {other for other, place in enumerate(found) if mirror.is_read_by(lane, place.ranks)} - {host}
            if lane < num_ranks:
                assert readers == set(range(num_hosts)) - {host}
            else:
                assert readers == {host - 1 if lane < 2 * num_ranks else host + 1}, (
                    "the leader's host has the last stages"
                )
    with pytest.raises(ValueError, match="there is no lane 200"):
        mirror.rank_of(200)


def test_a_pipe_between_hosts_carries_every_byte() -> None:
    """Rows of several pieces of a buffer, and of one; the sender may be two pieces ahead."""
    first, last = reversed(places(1, 2, 1, 2))
    memories = [make_links_memory(2, 2) for _ in range(2)]
    mirrors = [LinksMirror(memory, place) for memory, place in zip(memories, (first, last), strict=True)]
    sender, receiver = (
        SharedLinks(memory, rank, 2, 2, deadline_s=20.0) for memory, rank in zip(memories, (1, 0), strict=True)
    )
    for memory in memories:
        os.close(memory)

    def carry(source: LinksMirror, target: LinksMirror, ranks: range) -> list[threading.Thread]:
        def send(lane: int, number: int, view: memoryview) -> None:
            target.room_for(lane, number, len(view))[:] = view
            target.publish(lane, len(view))

        return [forward(source, lane, send) for lane in source.lanes_of(ranks)]

    threads = carry(mirrors[0], mirrors[1], first.ranks) + carry(mirrors[1], mirrors[0], last.ranks)
    rows = [torch.randn(num_rows, 1024) for num_rows in (1, 3000, 7, 1024, 2048)]
    assert sender.links.after is not None
    assert receiver.links.before is not None
    after = sender.links.after

    def send_all() -> None:
        for each in rows:
            after.send(each)

    sending = threading.Thread(target=send_all)
    sending.start()
    found = [receiver.links.before.receive(torch.empty_like(each)) for each in rows]
    sending.join(20)
    assert not sending.is_alive()
    assert all(map(torch.equal, found, rows))
    for mirror in mirrors:
        mirror.end()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
