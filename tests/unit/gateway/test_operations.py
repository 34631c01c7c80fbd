"""`/admin/overview`: everything on one page, asked of the routers once a second however many look."""

import asyncio
from pathlib import Path

import httpx
import orjson

from tandem.core.clock import ManualClock
from tandem.core.draft_counts import DraftCounts
from tandem.core.errors import UnavailableError
from tandem.core.expert_rows import ExpertRows
from tandem.core.process_usage import ProcessUsage
from tandem.gateway.operations import MAX_LINKS, Overview
from tandem.rpc.messages import Decision
from tandem.rpc.rank_messages import RankReport
from tests.helpers.fake_backend import MAX_MODEL_LEN, MODEL, FakeCluster, eventually, tell
from tests.helpers.page_backend import listing, page_cluster

COMPLETION = {"model": MODEL, "prompt": "abc", "seed": 1, "max_tokens": 6}


def test_it_shows_processes_the_model_and_decisions(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        await eventually(lambda: cluster.gateway.gateway.model_info.known is not None)
        cluster.routers[0].decided = [Decision(request_id="one", age_s=1.0, policy="first", decode_id="decode-0")]
        told = (await client.get("/admin/overview")).json()
        assert [entry["role"] for entry in told["processes"]] == ["gateway", "router", "decode", "decode"]
        assert f"http://{told['processes'][0]['address']}" == cluster.url
        assert told["processes"][2]["blocks"]["used"] == 10
        assert told["model"] == {"name": MODEL, "max_model_len": MAX_MODEL_LEN, "block_size": 16}
        assert [entry["request_id"] for entry in told["decisions"]] == ["one"]
        assert (told["links"], told["num_links"]) == ([], 0)

    tell(tmp_path, story)


def test_what_was_served_is_in_the_live_figures(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        await client.post("/v1/completions", json=COMPLETION)
        recent = cluster.gateway.gateway.metrics.recent
        await eventually(lambda: sum(recent.as_json()["series"]["output_tokens_per_s"]) == 6)
        live = (await client.get("/admin/overview")).json()["live"]
        assert sum(live["series"]["requests_per_s"]) == 1
        assert sum(live["series"]["output_tokens_per_s"]) == 6
        assert live["ttft_ms"]["p50"] > 0
        assert live["tpot_ms"]["p50"] > 0
        hour = (await client.get("/admin/overview")).json()["hour"]
        assert (hour["num_requests"], hour["step_s"]) == (1, 60)

    tell(tmp_path, story)


def test_an_answered_error_is_in_the_live_figures(tmp_path: Path) -> None:
    """Of one's own making, or refused: the first is a failure of the server's."""

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        assert (await client.post("/v1/completions", json={**COMPLETION, "max_tokens": -1})).status_code == 400
        cluster.routers[0].refuse = UnavailableError("nobody is left", 1.0)
        assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 503
        recent = cluster.gateway.gateway.metrics.recent
        await eventually(lambda: recent.as_json()["num_failed"] == 1)
        told = recent.as_json()
        assert (told["num_refused"], told["failed_share"], told["refused_share"]) == (1, 0.5, 0.5)

    tell(tmp_path, story, failover_timeout_s=0)


def test_every_process_tells_its_cpu_and_memory_or_that_it_does_not(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        cluster.workers[0].usage = ProcessUsage(5 << 30, 1.25)
        told = (await client.get("/admin/workers")).json()["workers"]
        gateway, router, busy, silent = told
        assert gateway["memory_bytes"] > 10 << 20
        assert (busy["cpu_cores"], busy["memory_bytes"]) == (1.25, 5 << 30)
        assert (silent["cpu_cores"], silent["memory_bytes"]) == (None, None)
        assert (router["cpu_cores"], router["memory_bytes"]) == (None, None)

    tell(tmp_path, story)


def test_workers_tell_their_drafts_or_that_they_do_not(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        cluster.workers[0].drafts = DraftCounts(10, (6, 4), (3, 1), 0.5)
        *_, drafting, silent = (await client.get("/admin/workers")).json()["workers"]
        assert drafting["drafts"] == {"num_steps": 10, "drafted_at": [6, 4], "accepted_at": [3, 1], "saved_s": 0.5}
        assert silent["drafts"] is None

    tell(tmp_path, story)


def test_workers_tell_their_ranks_or_that_there_is_one(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        cluster.workers[0].ranks = RankReport((7, 12), 2, ExpertRows((30, 50), 60), (1, 0), hosts=("", "host 1"))
        *_, ranked, single = (await client.get("/admin/workers")).json()["workers"]
        experts = {"by_rank": [30, 50], "busiest": 60, "imbalance": 1.5}
        both = {"part": 0, "num_parts": 1, "context": None, "silent_s": None}
        members = [
            {"rank": 0, "pid": 7, "host": None, "stage": 1, **both},
            {"rank": 1, "pid": 12, "host": "host 1", "stage": 0, **both},
        ]
        told = {"pids": [7, 12], "num_epochs": 2, "experts": experts, "stages": [1, 0], "contexts": []}
        assert ranked["ranks"] == {**told, "members": members}
        assert single["ranks"] is None
        cluster.workers[0].ranks = RankReport((7, 8, 9, 10), 1, contexts=(1, 1, 0, 0), silent_s=(0.0, 0.25, 0.1, 1.5))
        *_, ranked, single = (await client.get("/admin/workers")).json()["workers"]
        assert [(each["context"], each["part"], each["silent_s"]) for each in ranked["ranks"]["members"]] == [
            (1, 0, 0.0),
            (1, 1, 0.25),
            (0, 0, 0.1),
            (0, 1, 1.5),
        ]
        assert {each["num_parts"] for each in ranked["ranks"]["members"]} == {2}

    tell(tmp_path, story)


def test_many_browsers_cost_the_routers_one_question_a_second(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        clock = ManualClock()
        overview = Overview(cluster.gateway.gateway, clock)
        bodies = await asyncio.gather(*(overview.body("here:1") for _ in range(20)))
        assert len(set(bodies)) == 1
        cluster.routers[0].workers.clear()
        clock.advance(0.9)
        assert await overview.body("here:1") == bodies[0]
        clock.advance(0.2)
        assert len(orjson.loads(await overview.body("here:1"))["processes"]) == 2

    tell(tmp_path, story)


def test_of_many_links_the_slow_ones_come_first_and_the_rest_is_counted(tmp_path: Path) -> None:
    async def run() -> None:
        async with page_cluster(tmp_path) as cluster, httpx.AsyncClient(base_url=cluster.url) as client:
            cluster.router.told = [listing(cluster.worker, "decode-1", num_links=300)]
            told = (await client.get("/admin/overview")).json()
        assert (told["num_links"], len(told["links"])) == (300, MAX_LINKS)
        assert [link["source_id"] for link in told["links"][:4]] == [
            "prefill-50",
            "prefill-150",
            "prefill-250",
            "prefill-0",
        ]
        assert told["links"][0]["to"] == "decode-1"
        assert "links" not in told["processes"][-1]

    asyncio.run(run())
