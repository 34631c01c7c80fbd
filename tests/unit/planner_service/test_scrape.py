"""Real HTTP servers on loopback addresses; only names are made up."""

import asyncio
import random
from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from tandem.core.errors import UnavailableError
from tandem.planner_service.scrape import GatewayScraper, resolve_host
from tandem.process.ports import free_ports
from tandem.telemetry.metrics_server import serve_metrics
from tests.unit.planner_service.gateways import FakeGateway, serving


def test_every_gateway_is_asked_and_who_is_away_is_named() -> None:
    async def story() -> None:
        (away,) = free_ports(1, "127.0.0.1", random.Random(7))
        first, second = FakeGateway(), FakeGateway()
        first.arrive()
        async with serving(first) as one, serving(second) as two:
            names = [f"127.0.0.1:{one.port}", f"127.0.0.1:{two.port}", f"127.0.0.1:{away}"]
            scrape = await GatewayScraper(names).scrape()
        assert {address: counts.num_arrivals for address, counts in scrape.counts.items()} == {names[0]: 1, names[1]: 0}
        (problem,) = scrape.problems
        assert f"gateway {names[2]} is not counted" in problem

    asyncio.run(story())


def test_every_address_of_a_name_is_a_gateway() -> None:
    async def story() -> None:
        first, second = FakeGateway(), FakeGateway()
        async with serving(first, "127.0.0.1") as one, serving(second, "127.0.0.2", one.port) as two:
            assert two.port == one.port
            asked: list[tuple[str, int]] = []

            async def resolve(host: str, port: int) -> Sequence[str]:
                asked.append((host, port))
                return ["127.0.0.1", "127.0.0.2"]

            scrape = await GatewayScraper([f"tandem-gateway:{one.port}"], resolve=resolve).scrape()
        assert asked == [("tandem-gateway", one.port)]
        assert set(scrape.counts) == {f"127.0.0.1:{one.port}", f"127.0.0.2:{one.port}"}
        assert not scrape.problems

    asyncio.run(story())


def test_a_host_is_one_gateway_even_with_addresses_of_both_kinds() -> None:
    assert asyncio.run(resolve_host("localhost", 80)) == ["127.0.0.1"]


def test_a_name_that_nobody_knows_is_a_problem() -> None:
    async def unknown(host: str, port: int) -> Sequence[str]:
        raise OSError("no such name")

    async def silent(host: str, port: int) -> Sequence[str]:
        await asyncio.Event().wait()
        return ()

    for resolve, words in ((unknown, "no such name"), (silent, "the name server is silent")):
        scraper = GatewayScraper(["nowhere:80"], resolve=resolve, timeout_s=0.05)
        (problem,) = asyncio.run(scraper.scrape()).problems
        assert words in problem
        assert "nowhere:80" in problem


def test_gateways_that_are_found_are_asked_besides() -> None:
    async def story() -> None:
        gateway = FakeGateway()
        async with serving(gateway) as server:
            address = f"127.0.0.1:{server.port}"

            async def find() -> Sequence[str]:
                return [address]

            assert set((await GatewayScraper([], find).scrape()).counts) == {address}
            assert set((await GatewayScraper([address], find).scrape()).counts) == {address}
        assert len((await GatewayScraper([address], find).scrape()).problems) == 1  # NOTE: it is away now, and one

    asyncio.run(story())


def test_finding_nobody_or_failing_to_is_a_problem() -> None:
    async def nobody() -> Sequence[str]:
        return ()

    async def refused() -> Sequence[str]:
        raise UnavailableError("403")

    async def silent() -> Sequence[str]:
        await asyncio.Event().wait()
        return ()

    for find, words in ((nobody, "no gateway is there"), (refused, "403"), (silent, "the Kubernetes API is silent")):
        (problem,) = asyncio.run(GatewayScraper([], find, timeout_s=0.05).scrape()).problems
        assert words in problem


def test_another_server_at_the_address_is_named() -> None:
    async def story() -> None:
        server = await serve_metrics(CollectorRegistry(), "127.0.0.1", 0, lambda: (200, {}))
        try:
            scrape = await GatewayScraper([f"127.0.0.1:{server.port}"]).scrape()
        finally:
            await server.close()
        assert not scrape.counts
        assert "is it a gateway of this version?" in scrape.problems[0]

    asyncio.run(story())


def test_an_error_page_is_no_answer_even_when_it_looks_like_one() -> None:
    async def story() -> None:
        page = FakeGateway().metrics.text()

        async def failing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 503 Service Unavailable\r\n\r\n" + page)
            writer.close()
            await writer.wait_closed()

        server = await asyncio.start_server(failing, "127.0.0.1", 0)
        async with server:
            scrape = await GatewayScraper([f"127.0.0.1:{server.sockets[0].getsockname()[1]}"]).scrape()
        assert not scrape.counts
        assert "its /metrics answers 503" in scrape.problems[0]

    asyncio.run(story())


def test_who_accepts_and_says_nothing_does_not_hold_up_the_others() -> None:
    async def story() -> None:
        async def nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()
            await writer.wait_closed()

        mute = await asyncio.start_server(nothing, "127.0.0.1", 0)
        port = mute.sockets[0].getsockname()[1]
        async with mute, serving(FakeGateway()) as server:
            names = [f"127.0.0.1:{port}", f"127.0.0.1:{server.port}"]
            scrape = await GatewayScraper(names, timeout_s=0.3).scrape()
        assert set(scrape.counts) == {names[1]}
        assert "no answer within 0.3 s" in scrape.problems[0]

    asyncio.run(story())
