"""A real cluster under fault tests: asks it, sees what its workers hold, and puts everything back on its feet."""

import asyncio
import shutil
import threading
import time
from collections.abc import Sequence, Set
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from tandem.core.scope import CacheScope
from tandem.core.timeline import Stage
from tandem.rpc.client import WorkerClient
from tandem.rpc.messages import GenerateCall, PrefillCall, WorkerAddress
from tests.faults.streams import PATIENCE_S, Answer, Asked
from tests.helpers import event_loop
from tests.helpers.checkpoints import Builder, save_tiny_qwen3
from tests.helpers.cluster import Cluster
from tests.helpers.redis_server import RedisServer
from tests.helpers.secret import AS_GATEWAY, AS_WORKER

LEASE_TTL_S = 2.0
MAX_FRESH_S = 1.75  # of a new request; NOTE: it takes 2 s where a router still trusts one that is dead
REPORT_S = 0.25  # how old a worker's own figures may be
WORKER_FLAGS = (
    *("--dtype", "float32", "--max-num-batched-tokens", "128", "--max-num-running", "16"),
    *("--lease-ttl-s", f"{LEASE_TTL_S:g}", "--checksum-share", "1", "--kv-cache-gib", "0.8"),
)
_TOKENIZER = Path(__file__).parents[2] / "demo" / "tandem-demo"
_POLL_S = 0.01


def save_slow_model(path: Path, build: Builder = save_tiny_qwen3, **options: Any) -> Path:
    """Random weights, about 0.1 s for 128 prompt tokens, 10 ms a token, 64 KiB of KV a token on one thread."""
    sizes: dict[str, Any] = {"hidden_size": 384, "intermediate_size": 768, "num_hidden_layers": 8, "head_dim": 128}
    heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 8}
    lengths: dict[str, Any] = {"vocab_size": 4096, "max_position_embeddings": 4096}
    build(path, initializer_range=0.1, **lengths | sizes | heads | options)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(_TOKENIZER / name, path / name)
    return path


class Scene:
    """A cluster and what is asked of it. Request ids, and salts unless given, never come twice."""

    def __init__(self, cluster: Cluster, redis: RedisServer | None = None) -> None:
        self.cluster = cluster
        self.redis = redis
        self._numbers = iter(range(1, 1_000_000))
        self._lock = threading.Lock()
        self._pauses = ExitStack()

    def new_salt(self) -> str:
        with self._lock:
            return f"salt-{next(self._numbers)}"

    def ask(self, asked: Asked, gateway: int = 0) -> Answer:
        """Send it; it is cold unless it has a salt of its own."""
        salt = self.new_salt()
        url = self.cluster.topology.gateway_url(gateway)
        return Answer(url, self.cluster.model, asked if asked.salt else asked.salted(salt), f"request-{salt}")

    def finished(self, asked: Asked, gateway: int = 0) -> Answer:
        """Ask and wait for the end."""
        with self.ask(asked, gateway) as answer:
            answer.wait()
        return answer

    def answer_to(self, asked: Asked) -> list[int]:
        """Its tokens, undisturbed."""
        answer = self.finished(asked)
        assert answer.error is None, answer.error
        assert len(answer.token_ids) == asked.max_tokens
        return answer.token_ids

    def pairing(self, answer: Answer, gateway: int = 0) -> dict[str, str]:
        """Its latest pairing: names of `prefill` and `decode`. KeyError: there is none yet."""
        record = self.cluster.get(f"/admin/requests/{answer.request_id}", gateway)
        found = [stage["attributes"] for stage in record["stages"] if stage["name"] == "pair"]
        pairing: dict[str, str] = next(attributes for attributes in reversed(found) if "decode" in attributes)
        return pairing

    def workers(self) -> list[str]:
        return [*self.cluster.names("prefill"), *self.cluster.names("decode")]

    def held(self, name: str) -> int:
        """Blocks and leases of a worker that are in use by anybody."""
        metrics = self.cluster.metrics(name)
        blocks = {state: int(count) for (state,), count in metrics["tandem_kv_blocks"].items()}
        leases = int(metrics.get("tandem_leases", {}).get(("valid",), 0))
        return blocks["used"] + blocks["leased"] + blocks["transferring"] + leases

    def transfer_failures(self, name: str) -> float:
        return sum(self.cluster.metrics(name).get("tandem_transfer_failures_total", {}).values())

    def transferred_bytes(self, name: str) -> float:
        """Pulled from peers."""
        return sum(self.cluster.metrics(name).get("tandem_transfer_bytes_total", {}).values())

    def seconds_until_free(self, names: Sequence[str], since_s: float, limit_s: float) -> float:
        """Seconds after `since_s` until nothing was held any more, for as long as a report may be old. Raises
        AssertionError after `limit_s`, naming what leaked.
        """
        free_s: float | None = None
        while True:
            held = {name: count for name in names if (count := self.held(name))}
            now_s = time.monotonic()
            free_s = None if held else free_s or now_s
            if free_s is not None and now_s - free_s > REPORT_S:
                return free_s - since_s
            assert not held or now_s - since_s < limit_s, f"held {now_s - since_s:.2f} s after the last request: {held}"
            time.sleep(_POLL_S)

    def warm_prefill(self, asked: Asked) -> None:
        """Every prefill worker gets the KV of this prompt, and nobody else does."""
        for worker in addresses(self.cluster, "prefill"):
            event_loop.run(compute(worker, asked))

    def pause_redis(self) -> None:
        """SIGSTOP, until `continue_all`."""
        assert self.redis is not None
        self._pauses.enter_context(self.redis.paused())

    def heal(self) -> None:
        """Continue what is stopped, restart what is dead; returns when every router sees every worker, and they each
        other.
        """
        self.continue_all()
        self._revive_redis()
        self.cluster.start()
        self.cluster.wait(lambda: not any(row.get("unreachable") for row in self.cluster.workers()), PATIENCE_S)

    def _revive_redis(self) -> None:
        if self.redis is not None:
            with self.redis.client() as client:
                try:
                    client.ping()
                except RedisError:
                    self.redis.start()

    def continue_all(self) -> None:
        """SIGCONT to everything."""
        self._pauses.close()
        for process in self.cluster.processes.values():
            if process.returncode is None:
                process.cont()


async def compute(worker: WorkerAddress, asked: Asked) -> None:
    """Have a prefill worker compute a prompt, as a decode worker would, and release it once all is computed."""
    reader = WorkerAddress("warmer", "127.0.0.1:1", "warmer")
    call = PrefillCall(
        request_id=f"warm {asked.salt}",
        reader=reader,
        prompt_token_ids=asked.prompt,
        params=asked.params(),
        scope=CacheScope(salt=asked.salt),
    )
    client, leases = WorkerClient(worker.address, AS_WORKER), set[str]()
    renewals = asyncio.create_task(_renew(client, leases))
    try:
        async for update in client.prefill(call, timeout_s=PATIENCE_S):
            leases |= set() if update.lease is None else {update.lease.lease_id}
        await client.release(sorted(leases))
    finally:
        renewals.cancel()
        await client.close()


async def _renew(client: WorkerClient, leases: Set[str]) -> None:
    while True:
        await asyncio.sleep(LEASE_TTL_S / 8)
        await client.renew(sorted(leases))


def addresses(cluster: Cluster, role: str) -> list[WorkerAddress]:
    """The living workers of a role."""
    return [
        WorkerAddress(row["worker_id"], row["address"], row["incarnation"])
        for row in cluster.workers()
        if row["role"] == role and row["is_alive"]
    ]


async def generate(call: GenerateCall) -> tuple[list[int], Sequence[Stage]]:
    """Tokens that the worker `call.decode` generates, and its timeline."""
    assert call.decode is not None
    client = WorkerClient(call.decode.address, AS_GATEWAY)
    token_ids: list[int] = []
    timeline: Sequence[Stage] = ()
    try:
        async for update in client.generate(call, timeout_s=PATIENCE_S):
            token_ids += update.output.token_ids
            timeline = update.timeline or timeline
    finally:
        await client.close()
    return token_ids, timeline


async def generate_with(scene: Scene, asked: Asked, prefill: WorkerAddress) -> list[int]:
    """The tokens that the first decode worker generates with that prefill worker; there is no spare."""
    decode = (await asyncio.to_thread(addresses, scene.cluster, "decode"))[0]
    call = GenerateCall(
        request_id=f"request-{scene.new_salt()}",
        prompt_token_ids=asked.prompt,
        params=asked.params(),
        scope=CacheScope(salt=scene.new_salt()),
        decode=decode,
        prefill=prefill,
    )
    return (await generate(call))[0]
