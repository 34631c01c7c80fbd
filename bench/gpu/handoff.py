"""KV handed from a prefill engine to a decode engine in two processes on one device, and how much of that is exposed.

The decode side pulls each chunk while the next one is computed, by NIXL and by plain CUDA IPC as the simplest thing
that could work. Exposed is what is left to wait for when the first token is there. Two processes without MPS take turns
on the GPU, so copies wait for the prefill's time slices: two GPUs would do better.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing

from bench.gpu.floors import measure_floors
from bench.gpu.handoff_process import begin
from bench.gpu.handoff_source import build_side, open_transports, share
from bench.gpu.handoff_words import Answered, Computed, Hello, Prefill, Sums, block_sums
from bench.gpu.results import Check, SectionResults
from bench.gpu.setting import Setting
from bench.gpu.stack import Stack
from bench.report import Row
from tandem.core.errors import TransportError
from tandem.core.sampling_params import SamplingParams
from tandem.scheduler.output import KVEvent, KVReserved, SampledToken
from tandem.scheduler.request import Handoff
from tandem.transport.base import KVTransport, Peer
from tandem.transport.blocks import plan_read
from tandem.transport.transfer import TransferState

LENGTHS, CHUNK = (2048, 8192, 32768), 2048
ROUNDS = 5
NEW_TOKENS = 8
START_S, ANSWER_S, READ_S, DRAIN_S = 120.0, 60.0, 30.0, 2.0

Blocks = Sequence[int]
Read = Callable[[Blocks, Blocks], Callable[[], None]]
"""(remote blocks, local blocks) -> what waits for the bytes"""


@dataclass(frozen=True, slots=True)
class Sample:
    """One hand-off. `pulled_s`: from the first block's event to the last byte."""

    ttft_s: float
    pulled_s: float
    exposed_s: float
    num_bytes: int
    is_whole: bool
    token_ids: list[int]


def run(setting: Setting, results: SectionResults, name: str) -> None:
    """All lengths by every way of reading that works here."""
    lengths, chunk = setting.pick_all(LENGTHS, (40, 90)), setting.pick(CHUNK, 32)
    context = torch.multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=begin, args=(theirs, setting, name, max(lengths), chunk), daemon=True)
    process.start()
    theirs.close()
    try:
        stack = build_side(setting, name, max(lengths), chunk)
        share(stack)
        hello = _receive(ours, START_S)
        assert isinstance(hello, Hello)
        _measure_all(setting, results, stack, ours, hello, lengths)
        del hello
    finally:
        ours.close()
        process.join(20)
        if process.is_alive():
            process.kill()


def _measure_all(
    setting: Setting, results: SectionResults, stack: Stack, source: Connection, hello: Hello, lengths: Sequence[int]
) -> None:
    readers: dict[str, Read] = {"cuda ipc": _mapped_reader(stack, hello.pages)}
    transports, refused = open_transports(stack)
    for name, reason in (hello.refused | refused).items():
        results.note(f"left out {name}: {reason}")
    for name, transport in transports.items():
        with results.guarded(f"connecting by {name}"):
            readers[name] = _transport_reader(transport, transport.connect(hello.cards[name]))
    try:
        for name, read in readers.items():
            for length in lengths:
                with results.guarded(f"{stack.model.name} hand-off of {length} by {name}"):
                    _measure(setting, results, stack, source, name, read, length)
    finally:
        for transport in transports.values():
            transport.close()


def _measure(
    setting: Setting, results: SectionResults, stack: Stack, source: Connection, name: str, read: Read, length: int
) -> None:
    floor = measure_floors(setting).bandwidth / 2  # every byte is read once and written once
    samples, same_tokens = [], []
    for index in range(ROUNDS + 1):
        rng = random.Random(1000 * length + index)
        prompt = [rng.randrange(stack.model.spec.vocab_size) for _ in range(length)]
        samples.append(hand_off(stack, source, read, prompt))
        if index < 2:
            same_tokens.append(samples[-1].token_ids == _alone(source, prompt))
    workload = f"{stack.model.name} hand-off {length}"
    is_whole = all(sample.is_whole for sample in samples)
    detail = f"bytes {'whole' if is_whole else 'DIFFER'}, tokens {'equal' if all(same_tokens) else 'DIFFER'}"
    results.check(Check("hand-off", f"{length} by {name}", is_whole and all(same_tokens), detail))
    for row in _rows(workload, name, samples[1:], floor):
        results.row(row)


def _rows(workload: str, name: str, samples: Sequence[Sample], floor: float) -> list[Row]:
    rates = [sample.num_bytes / sample.pulled_s / 1e9 for sample in samples]
    figures = {
        ("time to first token", "ms"): [sample.ttft_s * 1e3 for sample in samples],
        ("exposed transfer", "ms"): [sample.exposed_s * 1e3 for sample in samples],
        ("exposed transfer, share of time to first token", "%"): [100 * s.exposed_s / s.ttft_s for s in samples],
    }
    rows = [
        Row(workload, name, metric, statistics.median(values), unit, samples=tuple(values))
        for (metric, unit), values in figures.items()
    ]
    rate = statistics.median(rates)
    return [*rows, Row(workload, name, "moved over time of the pull", rate, "GB/s", floor / 1e9, samples=tuple(rates))]


def hand_off(stack: Stack, source: Connection, read: Read, prompt: list[int]) -> Sample:
    """One prompt: computed there, decoded here."""
    reserved: list[KVReserved] = []

    def hear(event: KVEvent) -> None:
        if isinstance(event, KVReserved):
            reserved.append(event)

    engine = stack.engine
    engine.on_kv_event = hear
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    started_s = time.monotonic()
    source.send(Prefill(prompt))
    request_id = engine.add_request(prompt, params, handoff=Handoff(num_expected_tokens=len(prompt)))
    try:
        engine.step()  # finds blocks for it
        local = reserved[0].groups[0].block_ids
        pairs, first_block_s, first = _pull(source, read, local)
        done_s = time.monotonic()
        engine.accept_token(request_id, SampledToken(first.token_ids[0]))
        engine.note_kv_ended(request_id, len(prompt))
        theirs = _sums(source, tuple(remote for remote, _ in pairs))
        is_whole = theirs == block_sums(stack.arena.pages, tuple(block for _, block in pairs))
        token_ids = [first.token_ids[0]]
        while engine.has_work:
            token_ids += [token_id for output in engine.step() for token_id in output.token_ids]
    except BaseException:
        engine.abort(request_id)
        _drain(source)
        raise
    finally:
        for event in reserved:
            engine.kv.drop(event.fetch_id)
    return Sample(
        ttft_s=first.sent_s - started_s,
        pulled_s=done_s - first_block_s,
        exposed_s=max(0.0, done_s - first.sent_s),
        num_bytes=len(pairs) * stack.arena.layout.page_bytes,
        is_whole=is_whole and len(pairs) == len(local),
        token_ids=token_ids,
    )


def _pull(source: Connection, read: Read, local: Blocks) -> tuple[list[tuple[int, int]], float, Answered]:
    """Reads every chunk as it is told of; returns when all is here and the first token is known."""
    waits, pairs, first_block_s = [], [], 0.0
    while not isinstance(event := _receive(source, ANSWER_S), Answered):
        assert isinstance(event, Computed)
        first_block_s = first_block_s or event.sent_s
        targets = local[event.first_index : event.first_index + len(event.block_ids)]
        chunk = list(zip(event.block_ids, targets, strict=False))
        waits.append(read([remote for remote, _ in chunk], [block for _, block in chunk]))
        pairs += chunk
    for wait in waits:
        wait()
    return pairs, first_block_s, event


def _alone(source: Connection, prompt: list[int]) -> list[int]:
    """Answer of the source's engine by itself."""
    source.send(Prefill(prompt, NEW_TOKENS))
    while not isinstance(event := _receive(source, ANSWER_S), Answered):
        pass
    return event.token_ids


def _sums(source: Connection, block_ids: tuple[int, ...]) -> tuple[int, ...]:
    source.send(Sums(block_ids))
    event = _receive(source, ANSWER_S)
    assert isinstance(event, Sums)
    return event.values


def _drain(source: Connection) -> None:
    """Drops late messages of a hand-off that failed, so that the next one reads only its own."""
    while source.poll(DRAIN_S):
        source.recv()


def _receive(source: Connection, timeout_s: float) -> Any:
    if not source.poll(timeout_s):
        raise TimeoutError(f"the source said nothing for {timeout_s:.0f} s")
    return source.recv()


def _transport_reader(transport: KVTransport, peer: Peer) -> Read:
    def read(remote_blocks: Blocks, local_blocks: Blocks) -> Callable[[], None]:
        transfer = transport.read(peer, remote_blocks, local_blocks, READ_S)

        def wait() -> None:
            transfer.wait()
            if transfer.state is not TransferState.DONE:
                raise TransportError(str(transfer.error))

        return wait

    return read


def _mapped_reader(stack: Stack, pages: torch.Tensor) -> Read:
    """The source's pages as this process maps them, copied run by run on a stream of their own."""
    ours, num_blocks = stack.arena.pages, pages.shape[0]
    stream = torch.cuda.Stream() if ours.is_cuda else None  # type: ignore[no-untyped-call]

    def copy(remote_blocks: Blocks, local_blocks: Blocks) -> None:
        for run in plan_read(remote_blocks, local_blocks, num_blocks, ours.shape[0]):
            target = ours[run.local : run.local + run.num_blocks]
            target.copy_(pages[run.remote : run.remote + run.num_blocks], non_blocking=True)

    def read(remote_blocks: Blocks, local_blocks: Blocks) -> Callable[[], None]:
        if stream is None:
            copy(remote_blocks, local_blocks)
            return lambda: None
        with torch.cuda.stream(stream):
            copy(remote_blocks, local_blocks)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return event.synchronize

    return read
