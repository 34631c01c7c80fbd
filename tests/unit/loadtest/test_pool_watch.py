"""Pools are read from what a gateway lists; whatever it answers, a test goes on."""

import asyncio
import json

from tandem.core.draft_counts import DraftCounts
from tandem.loadtest.pool_watch import PoolSample, PoolWatch, drafts_between, pool_samples
from tests.unit.loadtest.scripted_server import json_answer, opened, scripted_server

BLOCKS = {"free": 50, "cached": 25, "used": 20, "leased": 5}
WORKERS = [
    {"role": "gateway", "is_alive": True, "state": "ready", "num_running": 9},
    {"role": "router", "is_alive": True, "state": "ready"},
    {"role": "prefill", "is_alive": True, "state": "ready", "num_running": 3, "num_waiting": 2, "blocks": BLOCKS},
    {"role": "decode", "is_alive": True, "state": "ready", "num_running": 3, "num_waiting": 0, "blocks": BLOCKS},
    {
        "role": "decode",
        "is_alive": False,
        "state": "draining",
        "age_s": 0.2,
        "num_running": 4,
        "num_waiting": 1,
        "blocks": BLOCKS,
    },
    {"role": "decode", "is_alive": False, "state": "draining", "age_s": 9.0, "num_running": 7, "blocks": BLOCKS},
    {"role": "decode", "is_alive": False, "state": "ready", "num_running": 7, "num_waiting": 7},
]


def test_each_role_is_summed_over_those_that_live() -> None:
    prefill, decode = pool_samples(json.dumps({"workers": WORKERS}).encode(), 1.5)
    assert prefill == PoolSample(1.5, "prefill", 1, 1, 1, 2, 0.25)
    assert decode == PoolSample(1.5, "decode", 2, 1, 6, 1, 0.25)


def test_drafts_of_a_role_are_summed() -> None:
    drafts = {"num_steps": 10, "drafted_at": [6, 4], "accepted_at": [3, 1], "saved_s": 0.25}
    workers = [
        {**WORKERS[3], "drafts": drafts},
        {**WORKERS[4], "drafts": drafts | {"drafted_at": [5], "accepted_at": [2], "saved_s": None}},
        {**WORKERS[3], "drafts": None},
    ]
    (decode,) = pool_samples(json.dumps({"workers": workers}).encode(), 0.0)
    assert decode.drafts == DraftCounts(20, (11, 4), (5, 1), 0.25)


def test_drafts_of_a_test_are_those_between_its_samples() -> None:
    """A worker that left takes its counts along, which are no drafts of the test."""

    counts = [
        DraftCounts(100, (50,), (20,), 2.0),
        DraftCounts(110, (57, 3), (24, 1), 2.5),
        DraftCounts(5, (2, 9), (1, 1), 0.5),
        DraftCounts(15, (7, 10), (5, 2), 0.25),
    ]
    samples = [PoolSample(at_s, "decode", 1, 1, 0, 0, 0.0, drafts) for at_s, drafts in enumerate(counts)]
    assert drafts_between(samples) == DraftCounts(20, (12, 4), (8, 2), 0.25)
    assert drafts_between(samples[:1]) is None


def test_a_pool_whose_workers_all_died_is_empty_not_absent() -> None:
    (decode,) = pool_samples(json.dumps({"workers": WORKERS[-1:]}).encode(), 0.0)
    assert (decode.num_alive, decode.num_ready, decode.num_running) == (0, 0, 0)


def test_other_answers_are_no_samples() -> None:
    for body in (b"", b"[]", b"{}", b'{"workers": 3}', b'{"workers": [1, null]}', b'{"workers": [{"role": [1]}]}'):
        assert pool_samples(body, 0.0) == []


def test_it_looks_until_told_to_stop() -> None:
    async def run() -> None:
        pages = {"/admin/workers": json_answer({"workers": WORKERS})}
        async with scripted_server(pages=pages) as server, opened(server.url) as endpoint:
            watch = PoolWatch(endpoint, 0.01)
            watching = asyncio.create_task(watch.watch())
            async with asyncio.timeout(5):
                while len(watch.samples) < 6:
                    await asyncio.sleep(0.005)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        assert watch.problem is None
        times = [sample.at_s for sample in watch.samples[::2]]
        assert times == sorted(set(times))

    asyncio.run(run())


def test_pools_are_looked_at_where_operators_are_answered() -> None:
    """Regression: a gateway with a port for operators shows no workers on the port of its clients."""

    async def run() -> None:
        pages = {"/admin/workers": json_answer({"workers": WORKERS})}
        async with (
            scripted_server(pages=pages) as operators,
            scripted_server() as server,
            opened(server.url, admin_url=operators.url) as endpoint,
        ):
            watch = PoolWatch(endpoint, 0.01)
            watching = asyncio.create_task(watch.watch())
            async with asyncio.timeout(5):
                while not watch.samples:
                    await asyncio.sleep(0.005)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            assert not any("/admin/workers" in head for head in server.heads)
        assert watch.problem is None

    asyncio.run(run())


def test_a_server_that_does_not_tell_is_asked_once() -> None:
    async def run() -> None:
        async with scripted_server() as server, opened(server.url) as endpoint:
            watch = PoolWatch(endpoint, 0.01)
            await asyncio.wait_for(watch.watch(), 5)
        assert watch.problem == "GET /admin/workers answers 404"
        assert sum("/admin/workers" in head for head in server.heads) == 1

    asyncio.run(run())


def test_a_server_that_is_away_leaves_a_hole() -> None:
    async def run() -> None:
        async with scripted_server() as server, opened(server.url) as endpoint:
            server.pages["/admin/workers"] = b"nonsense\r\n\r\n"
            watch = PoolWatch(endpoint, 0.01)
            watching = asyncio.create_task(watch.watch())
            async with asyncio.timeout(5):
                while watch.problem is None:
                    await asyncio.sleep(0.005)
                server.pages["/admin/workers"] = json_answer({"workers": WORKERS})
                while not watch.samples:
                    await asyncio.sleep(0.005)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    asyncio.run(run())


def test_no_interval_means_no_looking() -> None:
    async def run() -> None:
        async with scripted_server() as server, opened(server.url) as endpoint:
            await asyncio.wait_for(PoolWatch(endpoint, 0.0).watch(), 5)
        assert not any("/admin/workers" in head for head in server.heads)

    asyncio.run(run())
