"""Calls between simulated nodes: they fare as over gRPC, whatever stands between."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from tandem.core.errors import CapacityError, UntrustedPeerError, WorkerLostError
from tandem.rpc.client import WorkerClient
from tandem.rpc.credentials import Credentials, ProcessRole
from tandem.rpc.network import current_network
from tandem.rpc.server import serve_worker
from tandem.simulation.fabric import EventTrace, Fabric, NetworkConditions
from tandem.simulation.loop import VirtualLoop
from tandem.simulation.network import SimulatedNetwork
from tandem.simulation.node import Node
from tests.helpers.secret import AS_ROUTER, AS_WORKER
from tests.unit.rpc.handlers import Worker

ADDRESS = "worker:7900"


@dataclass
class Pair:
    """A client's node and a worker's, and what is between them."""

    loop: VirtualLoop
    fabric: Fabric
    network: SimulatedNetwork
    client: Node
    server: Node
    handler: Worker = field(default_factory=Worker)


Story = Callable[[Pair, WorkerClient], Awaitable[None]]


def tell(story: Story, credentials: Credentials = AS_WORKER) -> None:
    """Run a story at the client, whose credentials are given, with a worker that serves."""
    loop = VirtualLoop("story")
    fabric = Fabric(loop, random.Random(1), EventTrace(), NetworkConditions(slow_share=0.0))
    network = SimulatedNetwork(fabric)
    near, far = (Node(name, loop.time, random.Random(name)) for name in ("client", "server"))
    for node in (near, far):
        loop.add(node)
        node.context.run(current_network.set, network.of(node))
    pair = Pair(loop, fabric, network, near, far)

    async def play() -> None:
        client = WorkerClient(ADDRESS, credentials)
        await story(pair, client)
        await client.close()

    async def run() -> None:
        await pair.server.spawn(loop, serve_worker(pair.handler, ADDRESS, AS_WORKER), "serve")
        await pair.client.spawn(loop, play(), "play")

    try:
        loop.run_until_complete(run())
        assert not loop.bugs
    finally:
        loop.tear_down()


def test_an_answer_comes_and_takes_its_way() -> None:
    async def story(pair: Pair, client: WorkerClient) -> None:
        assert await client.renew(["a", "b"]) == ("a",)
        assert 0.0 < pair.loop.time() < 0.1

    tell(story)


def test_an_error_keeps_its_class_and_its_advice() -> None:
    async def story(pair: Pair, client: WorkerClient) -> None:
        pair.handler.raises = CapacityError("full", 2.5)
        with pytest.raises(CapacityError, match="full") as raised:
            await client.renew([])
        assert raised.value.retry_after_s == 2.5

    tell(story)


def test_nobody_there_is_told_at_once_and_again_without_asking() -> None:
    async def story(pair: Pair, client: WorkerClient) -> None:
        other = WorkerClient("nobody:1", AS_WORKER)
        for _ in range(2):
            with pytest.raises(WorkerLostError, match="connection refused"):
                await other.renew([])
        assert pair.loop.time() < 0.1

    tell(story)


def test_a_partition_outlasts_a_deadline_and_then_heals() -> None:
    async def story(pair: Pair, client: WorkerClient) -> None:
        await client.renew([])
        pair.fabric.block("server", "client")
        with pytest.raises(WorkerLostError, match="did not answer within"):
            await client.renew(["x"], timeout_s=1.0)
        pair.fabric.heal("server", "client")
        assert await client.renew(["y", "z"]) == ("y",)

    tell(story)


def test_a_connection_that_left_a_question_unanswered_is_left_for_a_new_one() -> None:
    async def story(pair: Pair, client: WorkerClient) -> None:
        await client.renew([])
        (first,) = pair.network.listeners[ADDRESS].wires
        pair.fabric.block("server", "client")
        with pytest.raises(WorkerLostError, match="did not answer within"):
            await client.renew(["x"], timeout_s=1.0)
        pair.fabric.heal("server", "client")
        assert await client.renew(["y"]) == ("y",)
        assert [wire for wire in pair.network.listeners[ADDRESS].wires if wire is not first]

    tell(story)


def test_what_was_cut_off_arrives_in_order_once_it_can() -> None:
    async def story(pair: Pair, client: WorkerClient) -> None:
        await client.renew([])
        pair.fabric.block("client", "server")
        asked = [asyncio.create_task(client.renew([str(number)], timeout_s=None)) for number in range(5)]
        await asyncio.sleep(3)
        assert pair.handler.calls == [("renew", ())]
        pair.fabric.heal("client", "server")
        await asyncio.gather(*asked)
        assert pair.handler.calls[1:] == [("renew", (str(number),)) for number in range(5)]

    tell(story)


def test_what_is_under_way_when_it_heals_does_not_overtake() -> None:
    async def story(pair: Pair, client: WorkerClient) -> None:
        await client.renew([])
        pair.fabric.block("client", "server")
        asked = [asyncio.create_task(client.renew(["held back"], timeout_s=None))]
        await asyncio.sleep(1)
        asked.append(asyncio.create_task(client.renew(["under way"], timeout_s=None)))
        await asyncio.sleep(1e-6)
        pair.fabric.heal("client", "server")
        await asyncio.gather(*asked)
        assert pair.handler.calls[1:] == [("renew", ("held back",)), ("renew", ("under way",))]

    tell(story)


def test_keepalive_ends_a_connection_that_is_cut_for_long() -> None:
    async def story(pair: Pair, client: WorkerClient) -> None:
        await client.renew([])
        pair.fabric.block("server", "client")
        with pytest.raises(WorkerLostError, match="keepalive"):
            await client.renew([], timeout_s=None)
        assert 5.0 <= pair.loop.time() <= 16.0

    tell(story)


def test_a_crash_is_noticed_at_once_where_its_host_lives() -> None:
    async def story(pair: Pair, client: WorkerClient) -> None:
        watch = client.watch(0.25)
        await anext(watch)
        at_s = pair.loop.time()
        pair.network.crash(pair.server, is_silent=False)
        pair.loop.kill(pair.server)
        with pytest.raises(WorkerLostError, match="reset by peer"):
            await anext(watch)
        assert pair.loop.time() - at_s < 0.5

    tell(story, AS_ROUTER)


def test_a_caller_that_leaves_cancels_the_handler() -> None:
    async def story(pair: Pair, client: WorkerClient) -> None:
        watch = client.watch(0.25)
        await anext(watch)
        assert not pair.handler.cancelled.is_set()
        await watch.aclose()
        await asyncio.sleep(0.1)
        assert pair.handler.cancelled.is_set()

    tell(story, AS_ROUTER)


def test_nobody_is_served_without_the_secret() -> None:
    async def story(pair: Pair, client: WorkerClient) -> None:
        for _ in range(2):
            with pytest.raises(UntrustedPeerError, match="same cluster secret"):
                await client.renew([])
        assert not pair.handler.calls

    tell(story, Credentials(b"another secret", ProcessRole.BOTH))


def test_a_role_is_refused_what_is_not_its_own() -> None:
    async def story(pair: Pair, client: WorkerClient) -> None:
        with pytest.raises(UntrustedPeerError, match="a router may not call Renew"):
            await client.renew([])
        assert not pair.handler.calls

    tell(story, AS_ROUTER)
