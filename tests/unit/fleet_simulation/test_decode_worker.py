"""A simulated decode worker against the loop it stands for, one step after another."""

import random
from dataclasses import dataclass

import pytest

from tandem.fleet_simulation.decode_worker import DecodeWorker
from tandem.fleet_simulation.events import EventQueue
from tandem.fleet_simulation.request import SimulatedRequest
from tandem.routing.speed import DecodeSpeed, PrefillSpeed, Speed
from tests.unit.fleet_simulation.builders import request

SPEED = Speed(PrefillSpeed(0.0, 1.0, 0.0), DecodeSpeed(10.0, 0.5, 0.01))


class Bench:
    def __init__(self, max_running: int = 64) -> None:
        self.events = EventQueue()
        self.ends_s: dict[str, float] = {}
        self.worker = DecodeWorker(self.events, SPEED, 1000, max_running, self.ended)

    def ended(self, request: SimulatedRequest) -> None:
        self.ends_s[request.request_id] = self.events.now_s

    def join_at(self, at_s: float, asked: SimulatedRequest) -> None:
        def join() -> None:
            self.worker.accept(asked, awaits_kv=False)
            self.worker.join(asked, awaited_kv=False)

        self.events.at(at_s, join)


@dataclass
class _Running:
    request_id: str
    context: int
    left: int


def _stepwise(joins: list[tuple[float, SimulatedRequest]]) -> dict[str, float]:
    """The loop: requests join between steps, each step makes one token for all."""
    now_s, running, ends_s = 0.0, list[_Running](), dict[str, float]()
    waiting = sorted(joins, key=lambda join: join[0])
    while waiting or running:
        if not running and waiting[0][0] > now_s:
            now_s = waiting[0][0]
        while waiting and waiting[0][0] <= now_s:
            asked = waiting.pop(0)[1].recorded
            number = str(len(ends_s) + len(running))
            running.append(_Running(number, asked.num_prompt_tokens + 1, asked.num_output_tokens - 1))
        step_ms = SPEED.decode.step_ms(len(running), sum(each.context for each in running))
        now_s += step_ms / 1000
        for each in running:
            each.context += 1
            each.left -= 1
        for each in [each for each in running if each.left == 0]:
            running.remove(each)
            ends_s[each.request_id] = now_s
    return ends_s


def test_alone_it_takes_the_sum_of_its_steps() -> None:
    bench = Bench()
    bench.join_at(0.0, request(0, 100, 51))
    bench.events.run()
    expected_ms = sum(SPEED.decode.step_ms(1, 101 + step) for step in range(50))
    assert bench.ends_s["0"] == pytest.approx(expected_ms / 1000, rel=1e-3)


def test_a_changing_batch_ends_when_the_loop_would() -> None:
    source = random.Random(3)
    joins, at_s = [], 0.0
    for number in range(60):
        at_s += source.expovariate(4.0)
        joins.append((at_s, request(number, source.randint(10, 500), source.randint(2, 120))))
    bench = Bench()
    for when_s, asked in joins:
        bench.join_at(when_s, asked)
    bench.events.run()
    loop_s, found_s = sorted(_stepwise(joins).values()), sorted(bench.ends_s.values())
    assert len(found_s) == 60
    assert all(found == pytest.approx(loop, abs=0.06) for found, loop in zip(found_s, loop_s, strict=True))


def test_more_than_fit_wait_for_a_place() -> None:
    bench = Bench(max_running=1)
    bench.join_at(0.0, request(0, 100, 11))
    bench.join_at(0.0, request(1, 100, 11))
    waiting = list[int]()
    bench.events.at(0.0, lambda: waiting.append(bench.worker.num_waiting))
    bench.events.run()
    assert waiting == [1]
    assert bench.ends_s["1"] == pytest.approx(2 * bench.ends_s["0"])


def test_a_prompt_computed_here_stops_the_batch() -> None:
    alone, joined = Bench(), Bench()
    for bench in (alone, joined):
        bench.join_at(0.0, request(0, 100, 21))
    firsts_s = list[float]()
    prompt = request(1, 300, 2)

    def compute() -> None:
        joined.worker.accept(prompt, awaits_kv=False)
        joined.worker.prefill(prompt, 0.3, lambda _: firsts_s.append(joined.events.now_s))

    joined.events.at(0.1, compute)
    alone.events.run()
    joined.events.run()
    assert firsts_s == [pytest.approx(0.4)]
    assert joined.ends_s["0"] == pytest.approx(alone.ends_s["0"] + 0.3)


def test_kv_is_promised_from_acceptance_to_the_end() -> None:
    bench = Bench()
    asked = request(0, 100, 11, num_blocks=7)
    bench.worker.accept(asked, awaits_kv=True)
    assert (bench.worker.num_reserved_blocks, bench.worker.num_awaiting_kv, bench.worker.idle) == (7, 1, False)
    bench.events.at(0.5, lambda: bench.worker.join(asked, awaited_kv=True))
    bench.events.run()
    assert (bench.worker.num_reserved_blocks, bench.worker.num_awaiting_kv, bench.worker.idle) == (0, 0, True)
    assert bench.worker.num_context_tokens() == pytest.approx(0.0)
