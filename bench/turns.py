"""Cost of a conversation's next turn outside the model: processor time of gateway, router and worker.

    python -m bench.turns [--lengths 1000,10000,100000] [--new 100,1000,10000] [--rounds 5] [--whole-rounds 1]
                          [--agents 64] [--agent-tokens 50000] [--at-once 8] [--save]

The gateway is a real process before an engine that answers at once; its own processor time counts, read from the
kernel in nanoseconds, so that a busy machine does not disturb. Router and worker are timed in this process, from the
bytes of the call to its decision, and to the end of the first step without the executor. Each sample is a conversation
of its own: sent once, then once more with a question that is `new` tokens long, which is measured. A second gateway
that keeps nothing of earlier turns is asked the same. Agents are conversations that take turns: some at once at the
gateway, one after another in router and worker, which know all of them.
"""

import argparse
import asyncio
import dataclasses
import gc
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import orjson

from bench.constraints import word_tokenizer
from bench.gateway import MODEL, NAME, System, ask, running
from bench.load import ForeignLoad, prioritise
from bench.overhead import BLOCK_SIZE, GREEDY, MAX_BATCHED_TOKENS, VOCAB_SIZE, Bench
from bench.report import Report, Row
from tandem.core.clock import SystemClock
from tandem.core.scope import UNSCOPED
from tandem.loadtest.http_client import HttpClient
from tandem.locality.embedded import EmbeddedIndex
from tandem.process.discovery import EmbeddedDiscovery
from tandem.process.fleet_view import FleetView
from tandem.process.fleet_watch import FleetWatch
from tandem.router.metrics import RouterMetrics
from tandem.router.prefix_lookup import PrefixLookup
from tandem.router.service import RouterService
from tandem.routing.admission import AdmissionLimits
from tandem.routing.calibration import Calibration
from tandem.routing.fleet import Fleet
from tandem.routing.pairing import Pairer
from tandem.routing.policies import PredictedCost
from tandem.routing.snapshot import Links, LinkState, Role, WorkerState
from tandem.routing.speed import DecodeSpeed, PrefillSpeed, Speed
from tandem.rpc.client import client_of
from tandem.rpc.credentials import Credentials, ProcessRole
from tandem.rpc.message_forms import GENERATE_CALL, PAIR_CALL
from tandem.rpc.messages import GenerateCall, ModelInfo, PairCall, WorkerAddress, WorkerStatus
from tandem.rpc.prompt_reuse import PromptSender, RememberedPrompts, ReusablePrompts
from tandem.text.tokenizer import Tokenizer

MESSAGE_TOKENS = 500
AGENT_TURNS = 3
AGENT_ANSWER_TOKENS, AGENT_QUESTION_TOKENS = 300, 1000
AGENT_TURN_TOKENS = AGENT_ANSWER_TOKENS + AGENT_QUESTION_TOKENS
KEEPING_NOTHING = ("--known-prompts-mib", "0")
MAX_WORKER_TOKENS = MAX_BATCHED_TOKENS  # so that one step of `bench.overhead`'s engine takes a whole conversation
FINGERPRINT = "f" * 32
PATH = "/v1/chat/completions"
Samples = dict[str, list[float]]


class Talks:
    """Conversations of random words, none of which repeats another."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        tokenizer = Tokenizer.load(Path(MODEL))
        words = [tokenizer.token(token_id) or "" for token_id in range(300, 3000)]
        self._words = [f" {word[1:]}" for word in words if word.startswith("Ġ") and word[1:].isascii()]

    def text(self, num_tokens: int) -> str:
        return "".join(self._random.choices(self._words, k=num_tokens))

    def messages(self, num_tokens: int) -> list[dict[str, str]]:
        """Questions and answers in turn, an answer last."""
        num_messages = max(2, num_tokens // MESSAGE_TOKENS // 2 * 2)
        each = num_tokens // num_messages
        return [{"role": ("user", "assistant")[index % 2], "content": self.text(each)} for index in range(num_messages)]

    def answered(self) -> list[dict[str, str]]:
        """An answer, and the next question."""
        answer, question = self.text(AGENT_ANSWER_TOKENS), self.text(AGENT_QUESTION_TOKENS)
        return [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]


async def gateway_samples(system: System, talks: Talks, num_tokens: int, num_new: int, rounds: int) -> Samples:
    """Core-ms in the gateway, and ms until the answer of an engine that takes no time."""
    client = HttpClient(system.url, {}, SystemClock())
    samples: Samples = {"gateway": [], "first token": []}
    try:
        for _ in range(rounds):
            before = talks.messages(num_tokens)
            question = {"role": "user", "content": talks.text(num_new)}
            await ask(client, PATH, _body([*before[:-1]]))
            body = _body([*before, question])
            used_ns, started_s = cpu_ns(system.process.pid), time.perf_counter()
            await ask(client, PATH, body)
            samples["first token"].append(1000 * (time.perf_counter() - started_s))
            samples["gateway"].append((cpu_ns(system.process.pid) - used_ns) / 1e6)
    finally:
        await client.close()
    return samples


async def agents_samples(system: System, talks: Talks, num_agents: int, num_tokens: int, at_once: int) -> Samples:
    """Core-ms in the gateway for each turn, of all of a round together; ms until the answer, of each."""
    client = HttpClient(system.url, {}, SystemClock())
    samples: Samples = {"gateway": [], "first token": []}
    agents = [talks.messages(num_tokens)[:-1] for _ in range(num_agents)]
    slots = asyncio.Semaphore(at_once)

    async def take_turn(messages: Sequence[dict[str, str]]) -> float:
        body = _body(messages)
        async with slots:
            started_s = time.perf_counter()
            await ask(client, PATH, body)
            return 1000 * (time.perf_counter() - started_s)

    try:
        for turn in range(1 + AGENT_TURNS):
            used_ns = cpu_ns(system.process.pid)
            waited = await asyncio.gather(*map(take_turn, agents))
            if turn:
                samples["gateway"].append((cpu_ns(system.process.pid) - used_ns) / 1e6 / num_agents)
                samples["first token"] += waited
            for messages in agents:
                messages += talks.answered()
    finally:
        await client.close()
    return samples


def _body(messages: Sequence[dict[str, str]]) -> bytes:
    return orjson.dumps({"model": NAME, "messages": messages, "max_tokens": 1})


def cpu_ns(pid: int) -> int:
    """Processor time of a process's threads, in nanoseconds; `times` of the kernel count in hundredths of a second."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir())


class Routing:
    """A router with one worker, in this process."""

    def __init__(self) -> None:
        clock = SystemClock()
        speed = Speed(PrefillSpeed(20.0, 0.01, 0.0), DecodeSpeed(20.0, 0.1, 1e-5))
        calibration = Calibration(speed)
        fleet = Fleet(AdmissionLimits(), Links(LinkState(1e9, 1.0)), calibration.speed)
        self._view = view = FleetView(fleet, calibration, clock)
        lookup = PrefixLookup(EmbeddedIndex(), is_remote=False)
        registry = EmbeddedDiscovery(clock)
        connect = partial(client_of, credentials=Credentials(b"bench", ProcessRole.ROUTER))
        watch = FleetWatch([registry], connect, view, lookup.remove_worker, poll_s=600.0)
        self._service = RouterService(
            view, watch, Pairer(fleet, PredictedCost()), lookup, registry, RouterMetrics(), clock
        )
        self._lookup = lookup
        self._loop = asyncio.Runner()
        self._reusable, self._kept = ReusablePrompts(), RememberedPrompts()

    def pair(self, call: PairCall) -> float:
        """Core-ms of a pairing, from the bytes of the call."""
        sender = PromptSender(self._reusable, "router", call)
        data = PAIR_CALL.encode(sender.next())
        sender.note_answer()
        return self._loop.run(self._paired(data))

    async def _paired(self, data: bytes) -> float:
        self._view.update("worker:1", _status())
        started_s = time.thread_time()
        await self._service.pair(self._kept.whole(PAIR_CALL.decode(data)))
        return 1000 * (time.thread_time() - started_s)

    def close(self) -> None:
        self._lookup.close()
        self._loop.close()


def _status() -> WorkerStatus:
    state = WorkerState(
        worker_id="worker", role=Role.BOTH, kind="", fingerprint=FINGERPRINT, block_size=BLOCK_SIZE, block_bytes=1,
        chunk_tokens=1024, num_total_blocks=1 << 20, num_free_blocks=1 << 20,
    )  # fmt: skip
    info = ModelInfo(
        name=NAME, fingerprint=FINGERPRINT, max_model_len=1 << 21, vocab_size=VOCAB_SIZE, block_size=BLOCK_SIZE,
        num_decode=1,
    )  # fmt: skip
    address = WorkerAddress("worker", "worker:1")
    return WorkerStatus(worker=address, pid=1, epoch=1, lifecycle="ready", state=state, model=info)


class Working:
    """A worker's engine without a model, in this process. `num_tokens`: room of its KV cache."""

    def __init__(self, num_tokens: int) -> None:
        with tempfile.TemporaryDirectory() as directory:
            word_tokenizer(Path(directory), VOCAB_SIZE)
            self._bench = Bench(Tokenizer.load(Path(directory)), num_tokens // BLOCK_SIZE, MAX_WORKER_TOKENS)
        self._bench.decoder.prepare(1.2)
        self._reusable, self._kept = ReusablePrompts(), RememberedPrompts()

    def first_step(self, given: GenerateCall) -> float:
        """Core-ms from the bytes of the call to the end of its first step, without the executor."""
        engine, executor = self._bench.engine, self._bench.executor
        sender = PromptSender(self._reusable, "worker", given)
        data = GENERATE_CALL.encode(sender.next())
        sender.note_answer()
        started_s = time.thread_time()
        call = self._kept.whole(GENERATE_CALL.decode(data))
        engine.add_request(call.prompt_token_ids, call.params, request_id=call.request_id, scope=call.scope)
        engine.step()
        took_s = time.thread_time() - started_s - executor.used_s
        engine.abort(call.request_id)
        return 1000 * took_s


def inner_samples(routing: Routing, working: Working, num_tokens: int, num_new: int, rounds: int) -> Samples:
    """Core-ms in the router, and in the worker outside its executor."""
    rng = random.Random(num_tokens * num_new)
    samples: Samples = {"router": [], "worker": []}
    for number in range(rounds):
        ids = [rng.randrange(VOCAB_SIZE - 1) for _ in range(num_tokens + num_new)]
        for length, is_measured in ((num_tokens, False), (num_tokens + num_new, True)):
            taken = _taken(routing, working, f"r{number}-{length}", ids[:length])
            for name, milliseconds in taken.items():
                if is_measured:
                    samples[name].append(milliseconds)
    return samples


def inner_agents_samples(routing: Routing, working: Working, num_agents: int, num_tokens: int) -> Samples:
    """As `inner_samples`, for every turn of agents that take them one after another."""
    rng = random.Random(num_agents * num_tokens)
    samples: Samples = {"router": [], "worker": []}
    agents = [rng.choices(range(VOCAB_SIZE - 1), k=num_tokens) for _ in range(num_agents)]
    for turn in range(1 + AGENT_TURNS):
        for number, ids in enumerate(agents):
            taken = _taken(routing, working, f"a{number}-{turn}", ids)
            for name, milliseconds in taken.items():
                if turn:
                    samples[name].append(milliseconds)
            ids += rng.choices(range(VOCAB_SIZE - 1), k=AGENT_TURN_TOKENS)
    return samples


def _taken(routing: Routing, working: Working, request_id: str, ids: list[int]) -> dict[str, float]:
    pair = PairCall(request_id=request_id, model=NAME, token_ids=tuple(ids), num_expected_output=1, scope=UNSCOPED)
    params = dataclasses.replace(GREEDY, max_tokens=2, seed=1)
    generate = GenerateCall(request_id=request_id, prompt_token_ids=tuple(ids), params=params, scope=UNSCOPED)
    found = {"router": routing.pair(pair)}
    if len(ids) <= MAX_WORKER_TOKENS:
        found["worker"] = working.first_step(generate)
    return found


def measure(given: argparse.Namespace) -> list[Row]:
    """All cases."""
    rows: list[Row] = []
    room = max(2 * MAX_WORKER_TOKENS, given.agents * (given.agent_tokens + (1 + AGENT_TURNS) * AGENT_TURN_TOKENS))
    talks, routing, working = Talks(7), Routing(), Working(room)
    gc.freeze()  # as router and worker do
    with running(1, 1) as system, running(1, 1, options=KEEPING_NOTHING) as whole:
        for each in (system, whole):
            asyncio.run(gateway_samples(each, talks, 100, 100, 3))
        for num_tokens in given.lengths:
            for num_new in given.new:
                load, case = ForeignLoad(), f"{num_tokens} tokens, {num_new} new"
                samples = asyncio.run(gateway_samples(system, talks, num_tokens, num_new, given.rounds))
                samples |= inner_samples(routing, working, num_tokens, num_new, given.rounds)
                rows += _rows(case, samples, load.cores())
                samples = asyncio.run(gateway_samples(whole, talks, num_tokens, num_new, given.whole_rounds))
                rows += _rows(f"{case}, nothing kept", samples, load.cores())
        if given.agents:
            load = ForeignLoad()
            samples = asyncio.run(agents_samples(system, talks, given.agents, given.agent_tokens, given.at_once))
            samples |= inner_agents_samples(routing, working, given.agents, given.agent_tokens)
            rows += _rows(f"{given.agents} agents of {given.agent_tokens} tokens", samples, load.cores())
        memory = system.memory_bytes() / 2**20
    routing.close()
    rows.append(Row("after all", "gateway", "memory", memory, "MiB"))
    return rows


def _rows(workload: str, samples: Samples, cores: float) -> list[Row]:
    rows = []
    for name, values in samples.items():
        if not values:
            continue
        metric, unit = ("until the answer", "ms") if name == "first token" else ("processor time", "core-ms")
        system = "gateway" if name == "first token" else name
        value = statistics.median(values)
        rows.append(Row(workload, system, metric, value, unit, samples=tuple(values), foreign_cores=cores))
        if name == "gateway":
            rows.append(Row(workload, system, "turns of a core", 1000 / value, "1/s", foreign_cores=cores))
        print(f"{workload}: {system} {metric} {value:.2f} {unit}", flush=True)
    return rows


def _numbers(written: str) -> list[int]:
    return [int(number) for number in written.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--lengths", type=_numbers, default="1000,10000,100000", help="tokens of the conversation, a list"
    )
    parser.add_argument("--new", type=_numbers, default="100,1000,10000", help="tokens of the next question, a list")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--whole-rounds", type=int, default=1, help="on the gateway that keeps nothing; 0: none")
    parser.add_argument("--agents", type=int, default=0, help="conversations that take turns; 0: none")
    parser.add_argument("--agent-tokens", type=int, default=50_000, help="tokens of each agent's first prompt")
    parser.add_argument("--at-once", type=int, default=8, help="turns of agents at the same time, at most")
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    prioritise()
    report = Report("turns", vars(given), measure(given))
    report.print()
    if given.save:
        report.save()


if __name__ == "__main__":
    main()
