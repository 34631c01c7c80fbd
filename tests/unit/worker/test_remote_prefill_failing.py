"""A prefill worker that fails, is silent, of another make or damaged: the request goes on, and nothing stays held."""

import asyncio
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.core.errors import IncompatiblePeerError, WorkerLostError
from tandem.core.output import RequestOutput
from tandem.core.sampling_params import SamplingParams
from tandem.engine.async_engine import AsyncEngine
from tandem.engine.engine import Engine
from tandem.rpc.messages import ConfirmAnswer, ConfirmCall, Greeting, WorkerAddress
from tandem.rpc.protocols import PROTOCOL_VERSION
from tandem.scheduler.output import SampledToken
from tandem.text.grammars import CompiledGrammar
from tandem.transport.inproc import InprocTransport
from tandem.transport.tcp.transport import TcpTransport
from tandem.worker import confirm
from tandem.worker.process import WorkerProcess
from tandem.worker.remote_prefill import RemotePrefill
from tests.helpers.handoffs import PROMPT, Gate, call_of
from tests.helpers.workers import (
    TIMEOUT_S,
    at_rest,
    front_of,
    generated,
    pair_of,
    until,
)


@pytest.mark.parametrize("number", [1, 2, 4, 5])
def test_a_prefill_worker_that_ends_in_the_middle_costs_a_recomputation(
    llama: Path, expected: list[int], number: int
) -> None:
    async def main() -> None:
        gate = Gate(number)
        async with pair_of(llama, lease_ttl_s=1) as pair, front_of(pair.prefill, change=gate) as front:
            task = asyncio.create_task(generated(pair.to_decode, call_of(pair, front.worker)))
            async with asyncio.timeout(TIMEOUT_S):
                await gate.reached.wait()
            await front.server.stop(0.0)
            assert await task == expected
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


@pytest.mark.parametrize("number", [1, 2, 4, 5])
def test_the_next_prefill_worker_takes_over(llama: Path, expected: list[int], number: int) -> None:
    async def main() -> None:
        gate = Gate(number)
        async with pair_of(llama, lease_ttl_s=1) as pair, front_of(pair.prefill, "p1", change=gate) as front:
            call = call_of(pair, front.worker, spares=(pair.prefill.core.me,))
            task = asyncio.create_task(generated(pair.to_decode, call))
            async with asyncio.timeout(TIMEOUT_S):
                await gate.reached.wait()
            await front.server.stop(0.0)
            assert await task == expected
            counters = await pair.decode.core.engine.call(lambda engine: engine.counters)
            assert counters.num_fetched_tokens == len(PROMPT)
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


def test_a_connection_that_takes_no_reads_is_made_anew(llama: Path, expected: list[int]) -> None:
    async def main() -> None:
        async with pair_of(llama) as pair:
            assert await generated(pair.to_decode, call_of(pair)) == expected
            transport = pair.decode.core.transports.get("inproc")
            assert isinstance(transport, InprocTransport)
            for peer in list(transport._copies._peers._links):
                transport.disconnect(peer)
            assert await generated(pair.to_decode, call_of(pair, salt="broken")) == expected
            before = await pair.decode.core.engine.call(lambda engine: engine.counters.num_fetched_tokens)
            assert await generated(pair.to_decode, call_of(pair, salt="anew")) == expected
            after = await pair.decode.core.engine.call(lambda engine: engine.counters.num_fetched_tokens)
            assert after - before == len(PROMPT)
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


def test_a_connection_that_was_cut_while_idle_costs_no_hand_off(llama: Path, expected: list[int]) -> None:
    """By a NAT or a firewall; who reads finds out, and all KV was computed again though its lease was valid."""

    async def main() -> None:
        async with pair_of(llama, transport="tcp") as pair:
            assert await generated(pair.to_decode, call_of(pair)) == expected
            transport = pair.prefill.core.transports.get("tcp")
            assert isinstance(transport, TcpTransport)
            for connection in list(transport._server._connections.values()):
                connection.shutdown(socket.SHUT_RDWR)
            before = await pair.decode.core.engine.call(lambda engine: engine.counters.num_fetched_tokens)
            assert await generated(pair.to_decode, call_of(pair, salt="cut")) == expected
            after = await pair.decode.core.engine.call(lambda engine: engine.counters.num_fetched_tokens)
            assert after - before == len(PROMPT)
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


def test_kv_that_does_not_arrive_is_computed_without_waiting_for_the_rest(llama: Path, expected: list[int]) -> None:
    """It was noticed when prefill had ended, however long that took."""

    async def main() -> None:
        gate = Gate(4)
        async with pair_of(llama) as pair, front_of(pair.prefill, change=gate) as front:
            front.handler.change_confirm = lambda answer: ConfirmAnswer(False)
            assert await generated(pair.to_decode, call_of(pair, front.worker)) == expected
            assert not gate.opened.is_set()
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


def test_a_confirmation_that_fails_after_prefill_has_ended_leads_to_the_next(
    llama: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confirm, "CONFIRM_TIMEOUT_S", 0.5)

    async def main() -> None:
        async with pair_of(llama) as pair, front_of(pair.prefill, "p1", silent={"confirm"}) as front:
            call = call_of(pair, front.worker, spares=(pair.prefill.core.me,))
            assert await generated(pair.to_decode, call) == expected
            counters = await pair.decode.core.engine.call(lambda engine: engine.counters)
            assert counters.num_fetched_tokens == len(PROMPT)
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


@pytest.mark.parametrize(
    "silent", [{"greet"}, {"prefill", "renew"}, {"confirm", "renew"}], ids=lambda names: "-".join(sorted(names))
)
def test_a_prefill_worker_that_never_answers_is_given_up(llama: Path, expected: list[int], silent: set[str]) -> None:
    async def main() -> None:
        async with pair_of(llama, lease_ttl_s=1) as pair, front_of(pair.prefill, silent=silent) as front:
            assert await generated(pair.to_decode, call_of(pair, front.worker)) == expected
            assert await generated(pair.to_decode, call_of(pair, salt="next")) == expected
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


def test_a_lease_that_ends_during_a_slow_prefill_is_never_used(llama: Path, expected: list[int]) -> None:
    async def main() -> None:
        gate = Gate(3)
        async with pair_of(llama) as pair, front_of(pair.prefill, change=gate) as front:
            task = asyncio.create_task(generated(pair.to_decode, call_of(pair, front.worker)))
            async with asyncio.timeout(TIMEOUT_S):
                await gate.reached.wait()
            (lease_id,) = pair.prefill.core.leases._leases
            pair.prefill.core.leases.end(lease_id)
            gate.opened.set()
            assert await task == expected
            counters = await pair.decode.core.engine.call(lambda engine: engine.counters)
            assert counters.num_fetched_tokens == 0, "what came under an ended lease was used"
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "value"), [("model", "another"), ("block_size", "32"), ("kv_layout", "float16"), ("hash_version", "0")]
)
def test_a_worker_of_another_make_is_refused_with_both_values(
    llama: Path, expected: list[int], caplog: pytest.LogCaptureFixture, name: str, value: str
) -> None:
    def other(greeting: Greeting) -> Greeting:
        return replace(greeting, compatibility={**greeting.compatibility, name: value})

    async def main() -> None:
        async with pair_of(llama) as pair, front_of(pair.prefill, change_greeting=other) as front:
            assert await generated(pair.to_decode, call_of(pair, front.worker)) == expected
            assert front.handler.calls == ["greet"], "it was asked for more than who it is"
            ours = pair.decode.core.compatibility[name]
            assert f"{name}: peer {value!r}, here {ours!r}" in caplog.text
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


def test_a_worker_refuses_a_reader_of_another_make(llama: Path) -> None:
    async def main() -> None:
        async with pair_of(llama) as pair:
            ours = pair.decode.core.greeting(PROTOCOL_VERSION)
            with pytest.raises(IncompatiblePeerError, match="model: peer 'another'"):
                await pair.to_prefill.greet(replace(ours, compatibility={**ours.compatibility, "model": "another"}))

    asyncio.run(main())


def test_another_incarnation_is_not_asked(llama: Path, expected: list[int], caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with pair_of(llama) as pair:
            former = replace(pair.prefill.core.me, incarnation="former")
            assert await generated(pair.to_decode, call_of(pair, former)) == expected
            assert "not former" in caplog.text
            with pytest.raises(WorkerLostError, match="not former"):
                await generated(
                    pair.to_decode, call_of(pair, decode=replace(pair.decode.core.me, incarnation="former"))
                )
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


# --- damaged bytes ----------------------------------------------------------------------------------------------------


def test_a_damaged_block_is_found_and_computed_again(llama: Path, expected: list[int]) -> None:
    """One bit of the source's page differs from what was read of it."""

    async def main() -> None:
        async with pair_of(llama) as pair, front_of(pair.prefill) as front:
            pages = pair.prefill.core.checksums._pages.pages[0].view(torch.uint8)

            def flip(call: ConfirmCall) -> None:
                pages[call.checksum_block_ids[-1]].view(-1)[-1] ^= 1

            front.handler.before_confirm = flip
            assert await generated(pair.to_decode, call_of(pair, front.worker)) == expected
            counters = await pair.decode.core.engine.call(lambda engine: engine.counters)
            assert counters.num_fetched_tokens == 0
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


class SlowGrammars:
    """Of one engine: compilation ends when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slow: AsyncEngine) -> None:
        self.may_end = asyncio.Event()
        compiled = AsyncEngine._compiled

        async def compiled_late(engine: AsyncEngine, params: SamplingParams) -> CompiledGrammar | None:
            if engine is slow:
                await self.may_end.wait()
            return await compiled(engine, params)

        monkeypatch.setattr(AsyncEngine, "_compiled", compiled_late)


def test_prefill_that_failed_while_a_grammar_was_compiled_is_made_up_for(
    llama: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine heard that nothing will come before it knew the request, which then waited for ever."""

    async def main() -> None:
        over = asyncio.Event()
        finish = RemotePrefill._finish

        def finished(remote: RemotePrefill) -> None:
            finish(remote)
            over.set()

        monkeypatch.setattr(RemotePrefill, "_finish", finished)
        async with pair_of(llama) as pair:
            grammars = SlowGrammars(monkeypatch, pair.decode.core.engine)
            gone = WorkerAddress("gone", "127.0.0.1:1", "x")
            answer = asyncio.create_task(generated(pair.to_decode, call_of(pair, gone)))
            await asyncio.wait_for(over.wait(), 20)
            grammars.may_end.set()
            assert await asyncio.wait_for(answer, 20) == expected
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


async def has_leased(worker: WorkerProcess) -> bool:
    return len(worker.core.leases) > 0


async def is_idle(worker: WorkerProcess) -> bool:
    return not worker.lifecycle.num_working


def test_a_first_token_that_comes_while_a_grammar_is_compiled_is_not_computed_again(
    llama: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[bool] = []
    accept_token = Engine.accept_token

    def accept(engine: Engine, request_id: str, token: SampledToken) -> list[RequestOutput]:
        outputs = accept_token(engine, request_id, token)
        taken.append(bool(outputs))
        return outputs

    monkeypatch.setattr(Engine, "accept_token", accept)

    async def main() -> None:
        async with pair_of(llama) as pair:
            grammars = SlowGrammars(monkeypatch, pair.decode.core.engine)
            answer = asyncio.create_task(generated(pair.to_decode, call_of(pair)))
            await until(lambda: has_leased(pair.prefill), "the lease")
            await until(lambda: is_idle(pair.prefill), "the end of what prefill says")
            grammars.may_end.set()
            assert await asyncio.wait_for(answer, 20) == expected
            assert taken == [True]
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())
