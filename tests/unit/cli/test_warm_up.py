"""Requests before ready: several at once, short, each its own prompt; a cluster that refuses them starts as well."""

import asyncio
from pathlib import Path

import httpx
import pytest

from tandem.cli.warm_up import warm_up
from tandem.core.errors import UnavailableError
from tandem.process.ports import bound
from tests.helpers.fake_backend import MODEL, FakeCluster, tell


@pytest.mark.parametrize("has_chat", [False, True])
def test_each_request_is_short_and_has_a_prompt_of_its_own(tmp_path: Path, has_chat: bool) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        await warm_up(cluster.url, MODEL, has_chat=has_chat, num_requests=3)
        calls = cluster.workers[0].calls
        assert len({tuple(call.prompt_token_ids) for call in calls}) == 3
        assert {(call.params.max_tokens, call.params.temperature) for call in calls} == {(4, 0.0)}
        records = [cluster.gateway.gateway.history.find(call.request_id) for call in calls]
        assert {record and record.kind for record in records} == {"chat" if has_chat else "text_completion"}

    tell(tmp_path, story)


def test_a_refusal_does_not_matter(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        (worker,) = cluster.workers
        worker.refuse = UnavailableError("starting")
        await warm_up(cluster.url, MODEL, has_chat=True, num_requests=2)
        await warm_up(cluster.url, "another", has_chat=True, num_requests=1)
        assert worker.calls

    tell(tmp_path, story, num_workers=1, failover_timeout_s=0.2)


def test_nobody_who_listens_does_not_matter() -> None:
    with bound("127.0.0.1", 0) as taken:  # NOTE: bound and not listened at, so that connections are refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        asyncio.run(warm_up(url, MODEL, has_chat=True, num_requests=2))
