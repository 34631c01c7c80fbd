"""Cost of proving who sends a call: processor time of a call with a proof, beside one with a fixed header.

    python -m bench.call_proofs [--rounds 40] [--calls 200] [--save]

Both kinds of call run in turn over real gRPC on loopback, client and server in one process, so their processor time is
that of both ends together. The fixed header is compared as protocol 1 compared its token; it proves nothing.
"""

import argparse
import asyncio
import hmac
import statistics
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc

from bench.instant_backend import AS_GATEWAY, AS_ROUTER
from bench.report import Report, Row
from tandem.core.scope import UNSCOPED
from tandem.rpc import methods
from tandem.rpc.channel import CLIENT_OPTIONS, SERVER_OPTIONS
from tandem.rpc.client import RouterClient
from tandem.rpc.messages import PairCall, PairingAnswer, WorkerAddress
from tandem.rpc.proofs import CallProof
from tandem.rpc.server import serve_router

HEADER = ("tandem-token", "0" * 64)
ANSWER = PairingAnswer(decode=WorkerAddress("d0", "127.0.0.1:1"))
PROMPTS = (64, 2048, 32768)  # tokens


class ImmediateRouter:
    """Answers `pair` at once; nothing else is asked."""

    async def pair(self, call: PairCall) -> PairingAnswer:
        return ANSWER

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return None


Ask = Callable[[PairCall], Awaitable[PairingAnswer]]


@asynccontextmanager
async def proven() -> AsyncIterator[Ask]:
    server = await serve_router(ImmediateRouter(), "127.0.0.1:0", AS_ROUTER)
    client = RouterClient(server.address, AS_GATEWAY)
    try:
        yield client.pair
    finally:
        await client.close()
        await server.stop()


@asynccontextmanager
async def unproven() -> AsyncIterator[Ask]:
    async def serve(data: bytes, context: Any) -> bytes:
        given = dict(context.invocation_metadata()).get(HEADER[0], "")
        assert hmac.compare_digest(given.encode(), HEADER[1].encode())
        methods.PAIR.request.decode(data)
        return methods.PAIR.encode_answer(ANSWER)

    server = grpc.aio.server(options=SERVER_OPTIONS)
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(serve)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(methods.ROUTER_SERVICE, {"Pair": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CLIENT_OPTIONS)
    pair: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(methods.PAIR.path)

    async def ask(call: PairCall) -> PairingAnswer:
        data = methods.PAIR.request.encode(call)
        return methods.PAIR.answer.decode(await pair(data, timeout=5.0, metadata=(HEADER,)))

    try:
        yield ask
    finally:
        await channel.close()
        await server.stop(None)


async def cpu_us(ask: Ask, call: PairCall, num_calls: int) -> float:
    """Microseconds of processor time a call."""
    started_s = time.process_time()
    for _ in range(num_calls):
        await ask(call)
    return (time.process_time() - started_s) / num_calls * 1e6


async def measure(num_rounds: int, num_calls: int) -> list[Row]:
    rows: list[Row] = []
    async with AsyncExitStack() as opened:
        kinds = {
            "fixed header": await opened.enter_async_context(unproven()),
            "proof": await opened.enter_async_context(proven()),
        }
        for num_tokens in PROMPTS:
            call = PairCall(
                request_id="r",
                model="m",
                token_ids=array("I", range(num_tokens)),
                num_expected_output=1,
                scope=UNSCOPED,
            )
            samples: dict[str, list[float]] = {name: [] for name in kinds}
            for ask in kinds.values():
                await cpu_us(ask, call, num_calls)
            for number in range(num_rounds):
                for name in sorted(kinds, reverse=bool(number % 2)):
                    samples[name].append(await cpu_us(kinds[name], call, num_calls))
            added = [proof - plain for proof, plain in zip(samples["proof"], samples["fixed header"], strict=True)]
            workload = f"Pair of {num_tokens} tokens"
            rows += [_row(workload, name, "processor time of a call", found) for name, found in samples.items()]
            rows.append(_row(workload, "proof", "added by the proof, both ends", added))
            rows.append(_row(workload, "proof", "the MAC alone, one end", mac_us(4 * num_tokens, num_rounds)))
    return rows


def mac_us(num_bytes: int, num_rounds: int) -> list[float]:
    proof, body, found = CallProof(bytes(32)), bytes(num_bytes), list[float]()
    for _ in range(num_rounds):
        started_s = time.process_time()
        for number in range(100):
            proof.of(number, methods.PAIR.path, body)
        found.append((time.process_time() - started_s) / 100 * 1e6)
    return found


def _row(workload: str, system: str, metric: str, samples: list[float]) -> Row:
    return Row(workload, system, metric, statistics.median(samples), "us", samples=tuple(samples))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    rows = asyncio.run(measure(arguments.rounds, arguments.calls))
    report = Report("call-proofs", {"rounds": arguments.rounds, "calls": arguments.calls}, rows)
    report.print()
    if arguments.save:
        print(report.save())


if __name__ == "__main__":
    main()
