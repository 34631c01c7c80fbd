"""Clients of a real cluster: over HTTP as users are, and over gRPC where a test chooses the workers itself.

What comes back is compared as `Reply`s, so that every way of serving a request can be held against every other.
"""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field, fields
from typing import Any

import httpx

from tandem.core.sampling_params import SamplingParams
from tandem.core.timeline import Stage
from tandem.routing.settlement import Settlement
from tandem.rpc.client import RouterClient, WorkerClient
from tandem.rpc.messages import GenerateCall, PairCall, PairingAnswer, WorkerAddress
from tests.helpers import event_loop
from tests.helpers.cluster import Cluster
from tests.helpers.secret import AS_GATEWAY

TIMEOUT_S = 60.0
_UNSAID = ("bad_words", "logprobs", "prompt_logprobs")  # NOTE: HTTP gives these in another form


@dataclass(frozen=True)
class Ask:
    """A prompt and how its answer is to be chosen."""

    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class Reply:
    """One choice, as its client got it."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass
class _Draft:
    """A choice that is still growing."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, piece: Mapping[str, Any]) -> None:
        self.token_ids += piece["token_ids"]
        self.text += piece["text"]
        self.finish_reason = piece["finish_reason"] or self.finish_reason
        self.stop_reason = piece.get("stop_reason", self.stop_reason)

    def reply(self) -> Reply:
        return Reply(tuple(self.token_ids), self.text, self.finish_reason, self.stop_reason)


def body_of(ask: Ask, model: str, *, stream: bool = False) -> dict[str, Any]:
    """`/v1/completions` with everything said that `ask` says."""
    default = SamplingParams()
    said = {f.name: getattr(ask.params, f.name) for f in fields(ask.params) if f.name not in _UNSAID}
    said = {k: v for k, v in said.items() if v != getattr(default, k) or k in ("temperature", "top_p", "top_k")}
    return {"model": model, "prompt": ask.prompt, "return_token_ids": True, "stream": stream, **said}


def complete(cluster: Cluster, ask: Ask, *, stream: bool = False) -> tuple[str, list[Reply]]:
    """(Request id, a reply for each choice)."""
    with _client() as client:
        return _complete(client, cluster, ask, stream)


def complete_all(cluster: Cluster, asks: Sequence[Ask], num_at_once: int) -> tuple[list[str], list[list[Reply]]]:
    """All of them, `num_at_once` at a time, every other as a stream: their ids, their replies."""
    with _client() as client, ThreadPoolExecutor(num_at_once) as pool:
        streams = [index % 2 == 1 for index in range(len(asks))]
        done = list(pool.map(lambda ask, stream: _complete(client, cluster, ask, stream), asks, streams))
    return [request_id for request_id, _ in done], [replies for _, replies in done]


def timeline(cluster: Cluster, request_id: str) -> list[Stage]:
    """The stages that the gateway knows of a request."""
    return [Stage(**stage) for stage in cluster.get(f"/admin/requests/{request_id}")["stages"]]


def addresses(cluster: Cluster) -> dict[str, WorkerAddress]:
    """The workers by id, once all of them are known to live."""
    found: dict[str, WorkerAddress] = {}

    def are_known() -> bool:
        for worker in cluster.workers():
            if "blocks" in worker and worker["is_alive"]:
                address = WorkerAddress(worker["worker_id"], worker["address"], worker["incarnation"])
                found[worker["worker_id"]] = address
        return found.keys() >= {*cluster.names("prefill"), *cluster.names("decode")}

    cluster.wait(are_known)
    return found


def generate_at(call: GenerateCall) -> tuple[Reply, list[Stage]]:
    """Answer of the worker `call.decode`, and its timeline."""
    return event_loop.run(_generate(call))


def pair(cluster: Cluster, call: PairCall) -> PairingAnswer:
    """Pairing that the first router chooses; its request is settled at once, without having been served."""
    return event_loop.run(_pair(_router_address(cluster), call))


def num_drafted(cluster: Cluster) -> float:
    """Number of tokens that workers have drafted."""
    name = "vllm:spec_decode_num_draft_tokens_total"
    workers = [*cluster.names("prefill"), *cluster.names("decode")]
    return sum(sum(cluster.metrics(worker).get(name, {}).values()) for worker in workers)


def is_idle(cluster: Cluster) -> bool:
    """Whether no living worker holds a block for anybody, by what each says of itself.

    NOTE: the release before had no state "transferring" and said "pinned" of such blocks.
    """
    names = [*cluster.names("prefill"), *cluster.names("decode")]
    alive = [name for name in names if cluster.processes[name].returncode is None]
    blocks = [cluster.blocks(name) for name in alive]
    return all(each["used"] == each["leased"] == each.get("transferring", each["pinned"]) == 0 for each in blocks)


def _client() -> httpx.Client:
    return httpx.Client(trust_env=False, timeout=TIMEOUT_S)


def _complete(client: httpx.Client, cluster: Cluster, ask: Ask, stream: bool) -> tuple[str, list[Reply]]:
    body = body_of(ask, cluster.model, stream=stream)
    got = client.post(f"{cluster.url}/v1/completions", json=body)
    assert got.status_code == 200, got.text
    pieces = _frames(got.text) if stream else [got.json()]
    drafts = [_Draft() for _ in range(ask.params.n)]
    for choice in (choice for piece in pieces for choice in piece["choices"]):
        drafts[choice["index"]].add(choice)
    return got.headers["x-request-id"], [draft.reply() for draft in drafts]


def _frames(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines[-1] == "[DONE]", text[-500:]
    return [json.loads(line) for line in lines[:-1]]


def _router_address(cluster: Cluster) -> str:
    listed: str = next(one["address"] for one in cluster.workers() if one["role"] == "router")
    return listed


async def _generate(call: GenerateCall) -> tuple[Reply, list[Stage]]:
    assert call.decode is not None
    client = WorkerClient(call.decode.address, AS_GATEWAY)
    draft, stages = _Draft(), list[Stage]()
    try:
        async with aclosing(client.generate(call, timeout_s=TIMEOUT_S)) as stream:
            async for update in stream:
                output = update.output
                piece = {"token_ids": output.token_ids, "text": output.text, "finish_reason": output.finish_reason}
                draft.add(piece if output.stop_reason is None else {**piece, "stop_reason": output.stop_reason})
                stages = list(update.timeline) if output.finished else stages
    finally:
        await client.close()
    return draft.reply(), stages


async def _pair(address: str, call: PairCall) -> PairingAnswer:
    client = RouterClient(address, AS_GATEWAY)
    try:
        answer = await client.pair(call)
        await client.settle(Settlement(request_id=call.request_id))
        return answer
    finally:
        await client.close()
