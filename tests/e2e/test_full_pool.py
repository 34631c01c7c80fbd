"""More at once than the KV cache holds: everybody is served in turn, with the tokens of one served alone."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.helpers.cluster import ROOT, Cluster, running_cluster
from tests.helpers.serving_clients import is_idle

DEMO = ROOT / "demo" / "tandem-demo"
NUM_REQUESTS = 5
NUM_PROMPT_TOKENS, NUM_TOKENS = 200, 300  # 32 blocks of the 64 there are: two fit at once, for 300 steps


def answer(client: httpx.Client, cluster: Cluster, seed: int) -> httpx.Response:
    prompt = [(7919 * seed + 31 * position) % 4000 for position in range(NUM_PROMPT_TOKENS)]
    body: dict[str, Any] = {"model": cluster.model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
    return client.post(f"{cluster.url}/v1/completions", json=body | {"ignore_eos": True})


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [pytest.param(0, 1, id="aggregated", marks=pytest.mark.slow), pytest.param(1, 1, id="1P1D")],
)
def test_all_are_served_in_turn(prefill: int, decode: int) -> None:
    flags = ("--dtype", "float32", "--kv-cache-gib", str(4 / 1024), "--max-model-len", "512")
    with (
        running_cluster(DEMO, prefill=prefill, decode=decode, extra={"worker": flags}) as cluster,
        httpx.Client(timeout=60.0, trust_env=False) as client,
        ThreadPoolExecutor(NUM_REQUESTS) as pool,
    ):
        alone = [answer(client, cluster, seed).json()["choices"][0]["text"] for seed in range(NUM_REQUESTS)]
        responses = list(pool.map(lambda seed: answer(client, cluster, seed), range(NUM_REQUESTS)))
        assert [response.status_code for response in responses] == [200] * NUM_REQUESTS
        assert [response.json()["choices"][0]["text"] for response in responses] == alone
        waited = [response for response in responses if "room;dur=" in response.headers["server-timing"]]
        assert waited, [response.headers["server-timing"] for response in responses]
        cluster.wait(lambda: is_idle(cluster), 5.0)
