"""Every path besides the generating ones: health, readiness, models, metrics, admin, documents."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families

from tandem.core.clock import ManualClock
from tandem.core.errors import CapacityError
from tandem.gateway import server
from tandem.rpc.messages import Decision, GenerateCall, GenerateUpdate
from tests.helpers.fake_backend import MAX_MODEL_LEN, MODEL, FakeCluster, eventually, tell

COMPLETION = {"model": MODEL, "prompt": "abc", "seed": 1, "max_tokens": 6}


def test_ready_follows_routers_and_workers_while_health_does_not(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        (router,) = cluster.routers
        assert (await client.get("/ready")).json() == {"status": "ready", "num_prefill": 0, "num_decode": 2}
        router.workers.clear()
        gone = await client.get("/ready")
        assert gone.status_code == 503
        assert "no live worker serves 'tiny'" in gone.json()["error"]["message"]
        router.workers += cluster.workers
        assert (await client.get("/ready")).status_code == 200
        router.is_stalled = True
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).json() == {"status": "ok"}

    tell(tmp_path, story, router_timeout_s=1.0)


def test_probes_may_ask_by_head(tmp_path: Path) -> None:
    """Load balancers do, and took a 405 for a gateway that is dead."""

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        for path in ("/health", "/ready", "/ping"):
            asked = await client.head(path)
            assert (asked.status_code, asked.content) == (200, b"")
        (router,) = cluster.routers
        router.workers.clear()
        gone = await client.head("/ready")
        assert (gone.status_code, gone.content) == (503, b"")
        assert all("head" not in item for item in (await client.get("/openapi.json")).json()["paths"].values())

    tell(tmp_path, story)


def test_a_model_that_no_worker_serves_is_unavailable_and_the_hint_names_what_is(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        response = await client.post("/v1/completions", json=COMPLETION | {"model": "mine"})
        assert response.status_code == 503
        assert "the workers serve tiny" in response.json()["error"]["message"]

    tell(tmp_path, story, served_model_name="mine", failover_timeout_s=0.1)


def test_the_model_is_named_after_its_directory_where_no_name_is_given(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == tmp_path.name

    tell(tmp_path, story, served_model_name=None)


def test_models_serve_both_kinds_of_client(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        await eventually(lambda: cluster.gateway.gateway.model_info.known is not None)
        listed = (await client.get("/v1/models")).json()
        assert (listed["object"], listed["has_more"], listed["first_id"]) == ("list", False, MODEL)
        (entry,) = listed["data"]
        assert (entry["object"], entry["type"], entry["lifecycle"]) == ("model", "model", "active")
        assert entry["max_model_len"] == MAX_MODEL_LEN
        assert (await client.get(f"/v1/models/{MODEL}")).json() == entry
        async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="x", _strict_response_validation=True) as api:
            assert [model.id async for model in api.models.list()] == [MODEL]
            assert (await api.models.retrieve(MODEL)).owned_by == "tandem"

    tell(tmp_path, story)


def test_admin_lists_every_process(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        cluster.routers[1].is_stalled = True
        listed = (await client.get("/admin/workers")).json()["workers"]
        assert [entry["role"] for entry in listed] == ["gateway", "router", "router", "decode", "decode"]
        gateway, router, away, worker, _ = listed
        assert (gateway["pid"], gateway["state"]) == (os.getpid(), "ready")
        assert f"http://{gateway['address']}" == cluster.url
        assert (router["is_alive"], router["pid"], router["state"]) == (True, os.getpid(), "ready")
        assert (away["is_alive"], away["pid"], away["state"]) == (False, None, "away")
        assert (worker["worker_id"], worker["pid"], worker["incarnation"]) == ("decode-0", 4242, "first")
        assert (worker["state"], worker["blocks"]["free"], worker["links"]) == ("ready", 80, [])

    tell(tmp_path, story, num_routers=2, router_timeout_s=1.0)


def test_admin_lists_the_decisions_of_every_router(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        early = Decision(request_id="early", age_s=9.0, policy="first", refusal="all are full")
        late = Decision(
            request_id="late",
            age_s=1.0,
            policy="first",
            prefill_id="p0",
            decode_id="d0",
            predicted_ms={"ttft": 12.0},
            measured_ms={"ttft": 15.5},
        )
        cluster.routers[0].decided = [late]
        cluster.routers[1].decided = [early]
        cluster.routers[2].is_stalled = True
        told = (await client.get("/admin/decisions")).json()["decisions"]
        assert [entry["request_id"] for entry in told] == ["early", "late"]
        assert [entry["refusal"] for entry in told] == ["all are full", ""]
        assert [entry["ttft_error_ms"] for entry in told] == [None, 3.5]
        assert told[0]["router"] != told[1]["router"]
        assert (await client.get("/admin/decisions?last=1")).json()["decisions"] == told[1:]
        for wrong in ("0", "1001", "many"):
            answer = await client.get(f"/admin/decisions?last={wrong}")
            assert answer.status_code == 400
            assert f"last='{wrong}'" in answer.json()["error"]["message"]

    tell(tmp_path, story, num_routers=3, router_timeout_s=1.0)


def test_metrics_count_what_was_served_under_the_names_that_dashboards_read(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        for _ in range(2):
            await client.post("/v1/completions", json=COMPLETION)
        text = (await client.get("/metrics")).text
        samples = {
            sample.name: sample
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.labels.get("finished_reason") in (None, "length")
        }
        expected = {
            "vllm:time_to_first_token_seconds_count": 2,
            "vllm:inter_token_latency_seconds_count": 10,
            "vllm:e2e_request_latency_seconds_count": 2,
            "vllm:prompt_tokens_total": 6,
            "vllm:generation_tokens_total": 12,
            "vllm:request_prompt_tokens_sum": 6,
            "vllm:request_generation_tokens_sum": 12,
            "vllm:request_success_total": 2,
            "vllm:num_requests_running": 0,
            "tandem_gateway_arrivals_total": 2,
            "tandem_gateway_arrived_prompt_tokens_total": 6,
            "tandem_gateway_prefix_cache_queries_total": 6,
            "tandem_gateway_prefix_cache_hits_total": 6,
            "tandem_gateway_open_streams": 0,
            "tandem_gateway_disconnects_total": 0,
        }
        assert {name: samples[name].value for name in expected} == expected
        assert samples["vllm:prompt_tokens_total"].labels == {"model_name": MODEL, "engine": "0"}

    tell(tmp_path, story)


def test_every_choice_has_its_own_duration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ends early is not as slow as the last."""
    clock = ManualClock()
    monkeypatch.setattr(server, "SystemClock", lambda: clock)

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        (worker,) = cluster.workers
        script = worker._script

        async def second_waits(call: GenerateCall) -> AsyncIterator[GenerateUpdate]:
            async for update in script(call):
                if call.request_id.endswith("/1") and update.output.finished:
                    await worker.go.wait()
                yield update

        monkeypatch.setattr(worker, "_script", second_waits)
        labels = '{engine="0",model_name="tiny"}'
        gaps = f"vllm:inter_token_latency_seconds_count{labels}"
        body = COMPLETION | {"n": 2, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if '"finish_reason":"length"' in line and not worker.go.is_set():
                    assert '"index":0' in line
                    while f"{gaps} 9.0" not in (await client.get("/metrics")).text:
                        pass  # 5 of the first choice, 4 of the second
                    clock.advance(0.5)
                    worker.go.set()
        text = (await client.get("/metrics")).text
        assert f"vllm:e2e_request_latency_seconds_sum{labels} 0.5" in text
        assert f"vllm:request_time_per_output_token_seconds_sum{labels} 0.1\n" in text
        assert f"vllm:request_time_per_output_token_seconds_count{labels} 2.0" in text

    tell(tmp_path, story, num_workers=1)


def test_what_is_refused_or_ends_early_has_arrived_too(tmp_path: Path) -> None:
    """Planners count demand: what was turned away is a part of it, and of its cache hits nothing is known."""

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        for worker in cluster.workers:
            worker.refuse = CapacityError("full")
        assert (await client.post("/v1/completions", json=COMPLETION | {"n": 2})).status_code == 429
        text = (await client.get("/metrics")).text
        assert "tandem_gateway_arrivals_total 2.0" in text
        assert "tandem_gateway_arrived_prompt_tokens_total 6.0" in text
        assert "tandem_gateway_prefix_cache_queries_total 0.0" in text

    tell(tmp_path, story)


def test_documents_describe_the_bodies(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        described = (await client.get("/openapi.json")).json()["paths"]
        schema = described["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert {"messages", "temperature", "cache_salt"} <= schema["properties"].keys()
        assert schema["required"] == ["model", "messages"]
        assert "$ref" not in str(schema)
        assert {"/health", "/ready", "/version", "/metrics", "/admin/workers", "/v1/models"} <= described.keys()
        assert (await client.get("/docs")).status_code == 200
        assert (await client.get("/version")).json()["version"]

    tell(tmp_path, story)


def test_allow_names_the_methods_of_all_routes_of_a_path(tmp_path: Path) -> None:
    """Regression: `Allow: GET` at a stored response, which may be deleted too."""

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        refused = await client.put("/v1/responses/resp_1")
        assert (refused.status_code, refused.headers["allow"]) == (405, "DELETE, GET")
        assert (await client.get("/v1/chat/completions")).headers["allow"] == "POST"

    tell(tmp_path, story)
