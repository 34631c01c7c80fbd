"""One prefill and two decode workers serve the demo checkpoint: what the openai SDK, curl and operators get to see.

The SDK runs in its strict mode, so that an answer of the wrong shape fails.
"""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion

from tests.helpers.cluster import ROOT, Cluster, running_cluster
from tests.helpers.serving_clients import is_idle, timeline

DEMO = ROOT / "demo" / "tandem-demo"
WORKER_FLAGS = ("--dtype", "float32", "--kv-cache-gib", "0.25", "--checksum-share", "1")
MESSAGES: Any = [{"role": "user", "content": "Write a function that adds two numbers."}]
PROMPT = "def add(a, b):\n"
COUNTERS = ("prompt_tokens_total", "generation_tokens_total", "request_success_total")
HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
)
OF_ENGINES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "cache_config_info",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "request_queue_time_seconds_count",
    "request_prefill_time_seconds_count",
    "request_decode_time_seconds_count",
)


@pytest.fixture(scope="module")
def serving() -> Iterator[Cluster]:
    flags = {"worker": WORKER_FLAGS, "router": ("--max-local-tokens", "0")}
    with running_cluster(DEMO, decode=2, extra=flags) as cluster:
        yield cluster


@pytest.fixture
def cluster(serving: Cluster) -> Iterator[Cluster]:
    """In the end it does nothing any more."""
    try:
        yield serving
        serving.wait(lambda: is_idle(serving), 5.0)
    except BaseException as error:
        error.add_note(serving.logs())
        raise


@pytest.fixture
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{cluster.url}/v1",
        api_key="any",
        max_retries=0,
        timeout=60.0,
        http_client=openai.DefaultHttpxClient(trust_env=False),
        _strict_response_validation=True,
    ) as client:
        yield client


def get(cluster: Cluster, path: str) -> httpx.Response:
    return httpx.get(f"{cluster.url}{path}", trust_env=False, timeout=10.0)


def test_chat_whole_and_streamed_are_the_same(cluster: Cluster, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": cluster.model, "messages": MESSAGES, "seed": 5, "max_tokens": 40}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    assert whole.usage is not None
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.content is not None
    assert 0 < whole.usage.completion_tokens <= 40
    assert len(whole.choices[0].logprobs.content) >= whole.usage.completion_tokens - 1
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_completions_of_several_prompts_and_choices(cluster: Cluster, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": cluster.model, "prompt": [PROMPT, "import"], "n": 2, "seed": 9, "max_tokens": 12}
    whole = client.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.usage is not None
    texts = [""] * 4
    for chunk in _lax(client).completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    assert len(set(texts)) == 4


def test_models(cluster: Cluster, client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == cluster.model == "tandem-demo"
    assert client.models.retrieve(cluster.model).id == cluster.model


def test_what_cannot_be_served_is_refused_as_openai_does(cluster: Cluster, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="tandem-demo") as unknown:
        client.completions.create(model="gpt-9", prompt=PROMPT)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")
    with pytest.raises(openai.BadRequestError, match="4096"):
        client.completions.create(model=cluster.model, prompt=[[5] * 4097])
    with pytest.raises(openai.BadRequestError, match="4096"):
        client.chat.completions.create(model=cluster.model, messages=[{"role": "user", "content": "no " * 9000}])
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=cluster.model, prompt=PROMPT, temperature=-1.0)


def test_health_and_ready(cluster: Cluster) -> None:
    assert get(cluster, "/health").status_code == 200

    def is_ready() -> bool:
        ready = get(cluster, "/ready")
        return (ready.status_code, ready.json()["num_prefill"], ready.json()["num_decode"]) == (200, 1, 2)

    cluster.wait(is_ready)


def test_metrics_have_the_names_that_dashboards_read(cluster: Cluster, client: openai.OpenAI) -> None:
    decodes = _decodes(cluster)
    before = [_total(cluster, name, "vllm:generation_tokens_total") for name in (*decodes, "gateway")]
    client.completions.create(model=cluster.model, prompt=PROMPT, max_tokens=20, extra_body={"ignore_eos": True})
    after = [_total(cluster, name, "vllm:generation_tokens_total") for name in (*decodes, "gateway")]
    shared = {f"vllm:{name}" for name in COUNTERS} | {f"vllm:{name}_count" for name in HISTOGRAMS}
    for name in ("gateway", "prefill-0", "decode-0", "decode-1"):
        metrics = cluster.metrics(name)
        assert shared <= metrics.keys(), name
        if name != "gateway":
            assert {f"vllm:{one}" for one in OF_ENGINES} <= metrics.keys(), name
    assert _total(cluster, "prefill-0", "vllm:prefix_cache_queries_total") > 0
    *generated, told = (now - then for now, then in zip(after, before, strict=True))
    assert sum(generated) == told == 20
    assert sum(_total(cluster, name, "tandem_transfer_bytes_total") for name in _decodes(cluster)) > 0


def test_every_process_is_listed_and_its_blocks_add_up(cluster: Cluster) -> None:
    listed: dict[str, Any] = {}

    def have_met() -> bool:
        listed.update({worker["worker_id"]: worker for worker in cluster.workers()})
        return [len(worker["links"]) for worker in listed.values() if "links" in worker] == [2, 2, 2]

    cluster.wait(have_met)
    assert sorted(worker["role"] for worker in listed.values()) == ["decode", "decode", "gateway", "prefill", "router"]
    assert all(worker["state"] == "ready" and worker["is_alive"] for worker in listed.values())
    assert len({worker["address"] for worker in listed.values()}) == 5
    for name in ("gateway", "prefill-0", "decode-0", "decode-1"):
        assert listed[name]["pid"] == cluster.processes[name].pid
        assert listed[name]["incarnation"]
    for name in ("prefill-0", "decode-0", "decode-1"):
        ((_, _, num_blocks),) = cluster.metrics(name)["vllm:cache_config_info"]
        assert sum(listed[name]["blocks"].values()) == sum(cluster.blocks(name).values()) == int(num_blocks)
        assert {link["source_id"] for link in listed[name]["links"]} == {"prefill-0", "decode-0", "decode-1"} - {name}
        assert all(link["bytes_per_s"] > 1e6 for link in listed[name]["links"])


def test_trace_tells_where_the_time_went(cluster: Cluster, client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(model=cluster.model, prompt=[list(range(100, 140))], max_tokens=9)
    request_id = raw.headers["x-request-id"]
    decode = cluster.get(f"/admin/requests/{request_id}")["workers"][-1]
    for said in (request_id, raw.parse().id):
        command = [sys.executable, "-m", "tandem.cli.main", "trace", said, "--url", cluster.url]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        rows = [line.split() for line in done.stdout.splitlines()]
        assert {(row[0], row[1]) for row in rows if len(row) > 1} >= {
            ("pair", "gateway"),
            ("queue", "prefill-0"),
            ("transfer", decode),
            ("decode", decode),
        }
        assert "3 blocks" in done.stdout
        assert "40 prompt tokens" in done.stdout


def test_a_worker_that_is_told_to_stop_finishes_its_streams(cluster: Cluster, client: openai.OpenAI) -> None:
    """SIGTERM in the middle of a stream: it goes on to its end there, and new requests go elsewhere."""
    stream = _stream(cluster, client)
    text = next(stream).choices[0].text
    request_id = stream.response.headers["x-request-id"]
    (worker,) = cluster.get(f"/admin/requests/{request_id}")["workers"]
    process = cluster.processes[worker]
    process.terminate()
    cluster.wait(lambda: (states := _states(cluster)) and states.get(worker) != "ready")
    assert cluster.get(f"/admin/requests/{request_id}")["state"] == "running"
    assert process.returncode is None
    meanwhile = _stream(cluster, client)
    texts = text + _rest(stream), _rest(meanwhile)
    assert texts[0] == texts[1]
    assert process.wait() == 0
    assert cluster.get(f"/admin/requests/{request_id}")["num_failovers"] == 0
    assert _workers(cluster, meanwhile) == [name for name in _decodes(cluster) if name != worker]
    assert {stage.process for stage in timeline(cluster, request_id) if stage.name == "decode"} >= {worker}
    process.restart()
    cluster.wait(lambda: _states(cluster).get(worker) == "ready")


def _total(cluster: Cluster, process: str, metric: str) -> float:
    return sum(cluster.metrics(process)[metric].values())


def _lax(client: openai.OpenAI) -> openai.OpenAI:
    """NOTE: streamed completions have no finish reason before the last chunk, which the SDK's own types forget."""
    return client.copy(_extra_kwargs={"_strict_response_validation": False})


def _stream(cluster: Cluster, client: openai.OpenAI) -> openai.Stream[Completion]:
    return _lax(client).completions.create(
        model=cluster.model,
        prompt=PROMPT,
        max_tokens=2500,
        seed=3,
        temperature=0.7,
        stream=True,
        extra_body={"ignore_eos": True},
    )


def _rest(stream: openai.Stream[Completion]) -> str:
    chunks = list(stream)
    assert chunks[-1].choices[0].finish_reason == "length"
    return "".join(choice.text for chunk in chunks for choice in chunk.choices)


def _workers(cluster: Cluster, stream: openai.Stream[Completion]) -> list[str]:
    served_by: list[str] = cluster.get(f"/admin/requests/{stream.response.headers['x-request-id']}")["workers"]
    return served_by


def _states(cluster: Cluster) -> dict[str, str]:
    return {worker["worker_id"]: worker["state"] for worker in cluster.workers() if worker["is_alive"]}


def _decodes(cluster: Cluster) -> list[str]:
    return cluster.names("decode")
