"""Connections to peers: one an incarnation, measured once, given up when the peer is silent."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.core.clock import ManualClock
from tandem.core.errors import IncompatiblePeerError, TransportError, UntrustedPeerError, WorkerLostError
from tandem.rpc.messages import ConfirmCall, Greeting, WorkerAddress
from tandem.rpc.protocols import PROTOCOL_VERSION
from tandem.transport.base import Peer
from tandem.worker.source import KVSource
from tandem.worker.sources import FORGET_AFTER_S, MAX_MET, MAX_PAUSE_S, Sources, check_compatible
from tests.helpers.workers import at_rest, front_of, pair_of, until


def test_those_who_ask_at_once_share_one_connection_that_is_measured(llama: Path) -> None:
    async def main() -> None:
        async with pair_of(llama) as pair, front_of(pair.prefill) as front:
            sources = Sources(pair.decode.core)
            first, second = await asyncio.gather(sources.connect(front.worker), sources.connect(front.worker))
            assert first is second is await sources.connect(replace(front.worker, incarnation=""))
            assert front.handler.calls == ["greet"]
            (link,) = sources.links
            assert (link.source_id, link.transport) == ("p0", "inproc")
            assert link.bytes_per_s > 0
            await sources.close()
            assert first.is_lost
            assert sources.links == ()
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


def test_measuring_takes_no_block_that_was_promised(llama: Path) -> None:
    async def main() -> None:
        async with pair_of(llama) as pair:
            engine = pair.decode.core.engine
            await engine.call(lambda e: e.kv.borrow("taken", 10_000))
            sources = Sources(pair.decode.core)
            source = await sources.connect(pair.prefill.core.me)
            assert source.link is None
            await sources.close()
            assert (await engine.call(lambda e: e.kv_usage)).transferring == (
                await engine.call(lambda e: e.kv_usage)
            ).total

    asyncio.run(main())


def test_a_silent_peer_is_lost_to_everybody_who_waits_for_it(llama: Path) -> None:
    async def main() -> None:
        silent = {"renew", "confirm"}
        async with pair_of(llama) as pair, front_of(pair.prefill, silent=silent) as front:
            sources = Sources(pair.decode.core)
            source = await sources.connect(front.worker)
            async with asyncio.timeout(10), source.in_use():
                with pytest.raises(WorkerLostError):
                    await source.client.confirm(ConfirmCall(lease_id="l"), timeout_s=30)
            assert source.is_lost
            with pytest.raises(TransportError):
                source.transport.read(source.peer, [1], [1])
            front.handler.silent.clear()
            assert await sources.connect(front.worker) is not source
            await sources.close()

    asyncio.run(main())


def test_a_peer_that_does_not_answer_is_told_of_and_not_waited_for_until_it_is_due(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request that was paired with it waited for two seconds, and routers were not told."""
    monkeypatch.setattr("tandem.worker.sources.GREETING_TIMEOUT_S", 1.0)  # NOTE: in which a connection must be made

    async def main() -> None:
        clock = ManualClock(0.0)
        async with pair_of(llama) as pair, front_of(pair.prefill, silent={"greet"}) as front:
            sources = Sources(replace(pair.decode.core, clock=clock))
            assert set(sources.unreachable) == set()
            for num_tries, wait_s in enumerate((1.0, 2.0, 4.0), 1):
                with pytest.raises(WorkerLostError, match="did not answer"):
                    await sources.connect(front.worker)
                for _ in range(3):
                    with pytest.raises(WorkerLostError, match=rf"p0 is tried again in {wait_s} s: .*did not answer"):
                        await sources.connect(front.worker)
                    await sources.meet([front.worker])
                assert front.handler.calls == ["greet"] * num_tries
                assert set(sources.unreachable) == {"p0"}
                clock.advance(wait_s)
            front.handler.silent.clear()
            monkeypatch.setattr("tandem.worker.sources.GREETING_TIMEOUT_S", 30.0)
            await sources.meet([front.worker])
            assert set(sources.unreachable) == set()
            assert [link.source_id for link in sources.links] == ["p0"]
            await sources.close()

    asyncio.run(main())


def test_a_peer_that_is_lost_is_told_of_until_it_is_connected_again(llama: Path) -> None:
    async def main() -> None:
        async with pair_of(llama) as pair, front_of(pair.prefill) as front:
            sources = Sources(pair.decode.core)
            await (await sources.connect(front.worker)).lose()
            assert set(sources.unreachable) == {"p0"}
            await sources.meet([front.worker])
            assert set(sources.unreachable) == set()
            await sources.close()

    asyncio.run(main())


def test_a_peer_that_was_started_again_is_not_told_of(llama: Path) -> None:
    """The pairing is stale, not the peer."""

    async def main() -> None:
        async with pair_of(llama) as pair, front_of(pair.prefill) as front:
            sources = Sources(pair.decode.core)
            with pytest.raises(WorkerLostError, match="not former"):
                await sources.connect(replace(front.worker, incarnation="former"))
            assert set(sources.unreachable) == set()
            await sources.connect(front.worker)
            await sources.close()

    asyncio.run(main())


def test_a_peer_is_the_worker_that_was_listed_at_its_address(llama: Path) -> None:
    """Regression: whoever answered was taken, and replaced the connection to the worker whose id it gave."""

    async def main() -> None:
        async with pair_of(llama) as pair, front_of(pair.prefill) as front, front_of(pair.prefill, "p1") as other:
            sources = Sources(pair.decode.core)
            source = await sources.connect(front.worker)
            with pytest.raises(WorkerLostError, match=rf"worker 'p1' is at {other.server.address} now, not p2"):
                await sources.connect(replace(other.worker, worker_id="p2", incarnation=""))
            alias = other.server.address.replace("127.0.0.1", "localhost")
            with pytest.raises(UntrustedPeerError, match=f"{alias} was expected there"):
                await sources.connect(replace(other.worker, address=alias))
            assert other.handler.calls == ["greet"]
            assert await sources.connect(front.worker) is source
            await sources.close()

    asyncio.run(main())


def test_a_peer_beyond_those_that_are_met_is_tried_again_too(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.worker.sources.MAX_MET", 0)

    async def main() -> None:
        async with pair_of(llama) as pair, front_of(pair.prefill) as front:
            sources = Sources(pair.decode.core)
            await sources.meet([front.worker])
            assert front.handler.calls == []
            await (await sources.connect(front.worker)).lose()
            await sources.meet([front.worker])
            assert front.handler.calls == ["greet", "greet"]
            assert set(sources.unreachable) == set()
            await sources.close()

    asyncio.run(main())


def test_a_peer_that_nobody_uses_is_left_alone(llama: Path) -> None:
    async def main() -> None:
        async with pair_of(llama) as pair, front_of(pair.prefill) as front:
            sources = Sources(pair.decode.core)
            source = await sources.connect(front.worker)
            source.keep("lease")
            async with source.in_use():
                await until(lambda: is_kept(source, 0), "the peer's word that it knows no such lease", 3)
            source.release("lease")
            await until(lambda: was_called(front.handler.calls, "release"), "the release")
            await sources.close()
            assert source._pings is None

    asyncio.run(main())


async def is_kept(source: KVSource, number: int) -> bool:
    return len(source._leases) == number


async def was_called(calls: list[str], name: str) -> bool:
    return name in calls


def test_those_who_are_not_there_do_not_stop_the_meeting(llama: Path) -> None:
    async def main() -> None:
        async with pair_of(llama) as pair:
            sources = Sources(pair.decode.core)
            gone = WorkerAddress("gone", "127.0.0.1:1", "x")
            await sources.meet([gone, pair.decode.core.me, pair.prefill.core.me])
            assert [link.source_id for link in sources.links] == ["p0"]
            source = await sources.connect(pair.prefill.core.me)
            await source.lose()
            assert sources.links == ()
            await sources.meet([])
            with pytest.raises(WorkerLostError, match=r"a session with 127\.0\.0\.1:1 was lost"):
                await sources.connect(gone)
            await sources.close()

    asyncio.run(main())


def test_of_a_large_fleet_only_some_are_met_and_told_of(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[str] = []

    async def connect(self: Sources, worker: WorkerAddress) -> None:
        met.append(worker.worker_id)

    monkeypatch.setattr(Sources, "connect", connect)

    async def main() -> None:
        async with pair_of(llama) as pair:
            others = [WorkerAddress(f"w{number}", f"127.0.0.1:{number}", "x") for number in range(1, 1001)]
            for core in (pair.decode.core, pair.decode.core, pair.prefill.core):
                await Sources(core).meet(others)
            again, first, other = (set(met[start : start + MAX_MET]) for start in (0, MAX_MET, 2 * MAX_MET))
            assert len(met) == 3 * MAX_MET
            assert first == again, "each time the same, or all would be met in the end"
            assert len(first & other) < MAX_MET // 2, "all meet the same few"

    asyncio.run(main())


def test_one_that_was_connected_anew_counts_as_connected_last(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.worker.sources.MAX_MET", 1)

    async def main() -> None:
        async with pair_of(llama) as pair, front_of(pair.prefill) as first, front_of(pair.prefill, "p1") as second:
            sources = Sources(pair.decode.core)
            for worker in (first.worker, second.worker):
                former = await sources.connect(worker)
            assert [link.source_id for link in sources.links] == ["p1"]
            await (await sources.connect(first.worker)).lose()
            await sources.connect(first.worker)
            assert [link.source_id for link in sources.links] == ["p0"]
            assert not former.is_lost
            await sources.close()

    asyncio.run(main())


def test_who_cannot_be_read_from_is_said_once_and_tried_ever_later(
    llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        clock = ManualClock(0.0)
        async with pair_of(llama) as pair, front_of(pair.prefill) as front:
            sources = Sources(replace(pair.decode.core, clock=clock))
            wrong = replace(front.worker, incarnation="another")
            for _ in range(400):
                await sources.meet([wrong])
                clock.advance(1.0)
            assert [call for call in front.handler.calls if call != "greet"] == []
            assert len(front.handler.calls) == len([1, 2, 4, 8, 16, 32, 60, 60, 60, 60, 60, 60])
            assert len([one for one in caplog.records if "cannot be read from" in one.message]) == 1
            await sources.meet([front.worker])
            assert [link.source_id for link in sources.links] == [front.worker.worker_id]
            await sources.close()

    with caplog.at_level("WARNING"):
        asyncio.run(main())


def test_those_who_are_no_longer_listed_are_forgotten_once_nobody_has_used_them_for_long(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with pair_of(llama) as pair:
            sources = Sources(pair.decode.core)
            source = await sources.connect(pair.prefill.core.me)
            await sources.meet([])
            assert [link.source_id for link in sources.links] == ["p0"]
            monkeypatch.setattr("tandem.worker.sources.FORGET_AFTER_S", 0.0)
            async with source.in_use():
                await sources.meet([])
                assert not source.is_lost
            await sources.meet([pair.prefill.core.me])
            assert not source.is_lost
            await sources.meet([])
            assert sources.links == ()
            assert await sources.connect(pair.prefill.core.me) is not source
            await sources.close()

    asyncio.run(main())


def test_using_a_connection_to_one_who_is_not_listed_keeps_it(llama: Path) -> None:
    async def main() -> None:
        clock = ManualClock(0.0)
        async with pair_of(llama) as pair:
            sources = Sources(replace(pair.decode.core, clock=clock))
            source = await sources.connect(pair.prefill.core.me)
            await sources.meet([])
            clock.advance(FORGET_AFTER_S - 1)
            assert await sources.connect(pair.prefill.core.me) is source
            clock.advance(2)
            await sources.meet([])
            assert not source.is_lost
            clock.advance(FORGET_AFTER_S)
            await sources.meet([])
            assert sources.links == ()
            await sources.close()

    asyncio.run(main())


def test_tcp_is_used_where_the_better_way_does_not_get_through(llama: Path) -> None:
    """A neighbour whose system forbids reading its memory has no card for it; nor has one of an older version."""

    def as_neighbour(greeting: Greeting) -> Greeting:
        cards = {name: card for name, card in greeting.cards.items() if name != "cma"}
        return replace(greeting, site={**greeting.site, "process": "another"}, cards=cards)

    async def main() -> None:
        async with (
            pair_of(llama, transport="auto") as pair,
            front_of(pair.prefill, change_greeting=as_neighbour) as front,
        ):
            sources = Sources(pair.decode.core)
            await sources.connect(front.worker)
            (link,) = sources.links
            assert link.transport == "tcp"
            await sources.close()

    asyncio.run(main())


def test_a_peer_that_cannot_be_measured_is_disconnected(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise TransportError("bulk data does not get through")

    async def main() -> None:
        clock = ManualClock(0.0)
        async with pair_of(llama, transport="tcp") as pair:
            sources = Sources(replace(pair.decode.core, clock=clock))
            transport = pair.decode.core.transports.get("tcp")
            disconnected: list[Peer] = []
            disconnect = transport.disconnect

            def noted(peer: Peer) -> None:
                disconnected.append(peer)
                disconnect(peer)

            monkeypatch.setattr(transport, "disconnect", noted)
            monkeypatch.setattr("tandem.worker.sources.measure_link", broken)
            for number in range(1, 4):
                with pytest.raises(TransportError, match="bulk data"):
                    await sources.connect(pair.prefill.core.me)
                assert len(disconnected) == number
                clock.advance(MAX_PAUSE_S)
            with pytest.raises(TransportError, match="not connected"):
                transport.read(disconnected[0], [1], [1])
            await sources.close()

    asyncio.run(main())


def test_every_difference_is_named_with_both_values(llama: Path) -> None:
    async def main() -> None:
        async with pair_of(llama) as pair:
            theirs = pair.prefill.core.greeting(PROTOCOL_VERSION)
            check_compatible(pair.decode.core.compatibility, theirs)
            other = replace(theirs, compatibility={"model": "m", "extra": "e"})
            with pytest.raises(IncompatiblePeerError) as raised:
                check_compatible({"model": "n", "block_size": "8"}, other)
            for words in ("model: peer 'm', here 'n'", "extra: peer 'e', here '(absent)'"):
                assert words in str(raised.value)
            assert "block_size: peer '(absent)', here '8'" in str(raised.value)

    asyncio.run(main())
