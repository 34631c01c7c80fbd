"""A partition between a prefill and a decode worker alone: a real router, real workers and a middleman between them."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from tandem.core.errors import TandemError
from tandem.core.scope import CacheScope
from tandem.process.ports import free_ports
from tandem.router.process import serving_router
from tandem.rpc.client import RouterClient
from tandem.rpc.messages import GenerateCall, PairCall, PairingAnswer
from tandem.rpc.server import serve_worker
from tests.helpers.callers import WorkerCaller
from tests.helpers.handoffs import PROMPT
from tests.helpers.secret import AS_GATEWAY, serving_as
from tests.helpers.workers import GREEDY, Middleman, Pair, at_rest, generated, pair_of, until
from tests.unit.process.stub_workers import router_settings

OF_PEERS = {"greet", "prefill", "lease", "renew", "confirm", "release"}  # NOTE: routers ask only status and watch


@dataclass(frozen=True, slots=True)
class Scene:
    """`between`: stands where the prefill worker is called; its `silent` methods get no answer."""

    pair: Pair
    between: Middleman
    router: RouterClient

    async def pairing(self, number: int) -> PairingAnswer:
        name = f"request {number}"
        call = PairCall(
            request_id=name, model="m", token_ids=PROMPT, num_expected_output=10, scope=CacheScope(salt=name)
        )
        return await self.router.pair(call)

    async def pairs_with(self, prefill_id: str | None) -> bool:
        """Whether the router names it, and knows both workers to be alive."""
        if not all(listing.is_alive for listing in await self.router.workers()):
            return False
        with contextlib.suppress(TandemError):
            prefill = (await self.pairing(0)).prefill
            return prefill_id == (None if prefill is None else prefill.worker_id)
        return False

    async def answer(self, number: int) -> tuple[list[int], int]:
        """To a request paired now, and how many tokens of its prompt came from the prefill worker."""
        engine = self.pair.decode.core.engine
        before = await engine.call(lambda e: e.counters.num_fetched_tokens)
        found = await self.pairing(number)
        call = GenerateCall(
            request_id=f"request {number}",
            prompt_token_ids=PROMPT,
            params=GREEDY,
            scope=CacheScope(salt=f"request {number}"),
            decode=found.decode,
            prefill=found.prefill,
        )
        token_ids = await generated(self.pair.to_decode, call)
        return token_ids, await engine.call(lambda e: e.counters.num_fetched_tokens) - before


@contextlib.asynccontextmanager
async def scene_of(path: Path) -> AsyncIterator[Scene]:
    ports = free_ports(2, "127.0.0.1", random.Random())
    bind, advertise = (f"127.0.0.1:{port}" for port in ports)
    async with contextlib.AsyncExitStack() as opened:
        router = await opened.enter_async_context(serving_router(router_settings(max_local_tokens=0)))
        to_router, to_real = (
            RouterClient(router.address, AS_GATEWAY),
            WorkerCaller(bind),
        )
        for client in (to_router, to_real):
            opened.push_async_callback(client.close)
        between = Middleman(to_real)
        both = {"routers": router.address, "served_model_name": "m"}
        prefill = {"bind": bind, "advertise": advertise}
        pair = await opened.enter_async_context(pair_of(path, prefill=prefill, **both))
        # NOTE: it must be the incarnation that the worker announces, which is known once that runs
        server = await serve_worker(between, advertise, serving_as(pair.prefill.core.me.incarnation))
        opened.push_async_callback(server.stop, 0.0)
        yield Scene(pair, between, to_router)


def test_they_are_paired_no_more_until_something_gets_through_again(llama: Path, expected: list[int]) -> None:
    """The router saw both alive and went on pairing them: each request lost two seconds before it was computed."""

    async def main() -> None:
        async with scene_of(llama) as scene:
            await until(lambda: scene.pairs_with("p0"), "a pairing with the prefill worker")
            assert await scene.answer(1) == (expected, len(PROMPT))
            scene.between.silent |= OF_PEERS
            assert await scene.answer(2) == (expected, 0)
            await until(lambda: scene.pairs_with(None), "a pairing without it")
            num_calls = scene.between.calls.count("prefill")
            for number in range(3, 6):
                assert await scene.answer(number) == (expected, 0)
            assert scene.between.calls.count("prefill") == num_calls
            scene.between.silent.clear()
            await until(lambda: scene.pairs_with("p0"), "a pairing with it again")
            assert await scene.answer(6) == (expected, len(PROMPT))
            await at_rest(scene.pair.prefill, scene.pair.decode)

    asyncio.run(main())
