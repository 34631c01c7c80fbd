"""Two keys over real workers: neither reads the other's cache, unless they are told to share."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.accounts.embedded import EmbeddedAccounts
from tandem.accounts.key import new_key
from tandem.core.clock import ManualClock
from tests.helpers.cluster import ROOT, Cluster, running_cluster

DEMO = ROOT / "demo" / "tandem-demo"
WORKERS = ("--dtype", "float32", "--kv-cache-gib", "0.1")
PROMPT = "def add(a, b):\n    return a + b\n" * 12


@pytest.fixture(scope="module")
def admin() -> dict[str, str]:
    return {}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, admin: dict[str, str]) -> Iterator[Cluster]:
    path = tmp_path_factory.mktemp("accounts") / "accounts.db"
    admin["key"] = _admin_key(path)
    flags = {"worker": WORKERS, "router": ("--max-local-tokens", "0"), "gateway": ("--accounts", str(path))}
    with running_cluster(DEMO, extra=flags) as running:
        yield running


def _admin_key(path: Path) -> str:
    async def make() -> str:
        store = EmbeddedAccounts(path, ManualClock())
        key, secret = new_key("operator", 1, is_admin=True)
        await store.add_key(key)
        await store.close()
        return secret

    return asyncio.run(make())


def new_secret(client: httpx.Client, admin: str, **fields: Any) -> str:
    made = client.post("/admin/keys", json={"name": "k", **fields}, headers={"x-api-key": admin})
    assert made.status_code == 201, made.text
    return str(made.json()["secret"])


def ask(client: httpx.Client, secret: str, salt: str | None = None) -> tuple[int, dict[str, Any]]:
    """Cached tokens that the answer says, and what the router found of the prompt."""
    body: dict[str, Any] = {"model": DEMO.name, "prompt": PROMPT, "max_tokens": 2, "temperature": 0}
    if salt is not None:
        body["cache_salt"] = salt
    answer = client.post("/v1/completions", json=body, headers={"x-api-key": secret})
    assert answer.status_code == 200, answer.text
    found = client.get(f"/admin/requests/{answer.headers['x-request-id']}", headers={"x-api-key": secret})
    pairs = [stage["attributes"] for stage in found.json()["stages"] if stage["name"] == "pair"]
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"], pairs[-1]


def num_found(pairing: dict[str, Any]) -> int:
    return int(pairing["prefill_cached_blocks"]) + int(pairing["decode_cached_blocks"])


def test_no_key_reads_another_tenants_cache(cluster: Cluster, admin: dict[str, str]) -> None:
    with httpx.Client(base_url=cluster.url, timeout=60, trust_env=False) as client:
        a, b = (new_secret(client, admin["key"]) for _ in "ab")
        assert ask(client, a)[0] == 0
        cluster.wait(lambda: ask(client, a)[0] > 0)
        cluster.wait(lambda: num_found(ask(client, a)[1]) > 0)
        cached, pairing = ask(client, b)
        assert cached == 0
        assert num_found(pairing) == 0
        assert ask(client, a, salt="mine")[0] == 0


def test_keys_that_share_do(cluster: Cluster, admin: dict[str, str]) -> None:
    with httpx.Client(base_url=cluster.url, timeout=60, trust_env=False) as client:
        both = [new_secret(client, admin["key"], share_cache_with="team") for _ in "ab"]
        outsider = new_secret(client, admin["key"], tenant="team")
        assert ask(client, both[0])[0] == 0
        cluster.wait(lambda: ask(client, both[1])[0] > 0)
        assert ask(client, outsider)[0] == 0
