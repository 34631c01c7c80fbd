"""A simulated prefill worker: first come first served, caches count when a prompt starts, pulls keep it."""

from tandem.fleet_simulation.events import EventQueue
from tandem.fleet_simulation.prefill_worker import PrefillWorker
from tandem.fleet_simulation.request import SimulatedRequest
from tandem.routing.speed import PrefillSpeed
from tests.unit.fleet_simulation.builders import request

SPEED = PrefillSpeed(0.0, 1.0, 0.0)


class Bench:
    """One worker whose prompts take a millisecond a token."""

    def __init__(self) -> None:
        self.events = EventQueue()
        self.worker = PrefillWorker(self.events, SPEED, 100, 16)
        self.done: list[tuple[str, float, float]] = []

    def finished(self, request: SimulatedRequest, service_s: float) -> None:
        self.done.append((request.request_id, self.events.now_s, service_s))


def test_prompts_wait_their_turn() -> None:
    bench = Bench()
    for number in range(3):
        bench.worker.prefill(request(number, 1000), bench.finished)
    assert (bench.worker.num_waiting, bench.worker.num_running, bench.worker.num_context_tokens) == (2, 3, 3000)
    bench.events.run()
    assert bench.done == [("0", 1.0, 1.0), ("1", 2.0, 1.0), ("2", 3.0, 1.0)]
    assert bench.worker.idle
    assert bench.worker.num_context_tokens == 0


def test_what_the_queue_brings_is_cached_by_the_time_a_prompt_starts() -> None:
    bench = Bench()
    ids = tuple(range(10))
    for number in range(2):
        bench.worker.prefill(request(number, 176, block_ids=ids), bench.finished)
    bench.events.run()
    assert [round(service_s, 6) for _, _, service_s in bench.done] == [0.176, 0.016]


def test_the_last_token_is_always_computed() -> None:
    bench = Bench()
    ids = tuple(range(10))
    for number in range(2):
        bench.worker.prefill(request(number, 160, block_ids=ids), bench.finished)
    bench.events.run()
    assert round(bench.done[1][2], 6) == 0.016


def test_queued_work_shrinks_as_it_is_done() -> None:
    bench, seen = Bench(), list[float]()
    bench.worker.prefill(request(0, 1000), bench.finished)
    bench.worker.prefill(request(1, 500), bench.finished)
    bench.events.at(0.25, lambda: seen.append(bench.worker.queued().num_tokens))
    bench.events.at(1.25, lambda: seen.append(bench.worker.queued().num_tokens))
    bench.events.run()
    assert [round(tokens, 6) for tokens in seen] == [1250, 250]
    assert bench.worker.queued().num_tokens == 0


def test_a_fetched_prefix_is_waited_for_and_not_computed() -> None:
    bench = Bench()
    bench.worker.prefill(request(0, 176, block_ids=tuple(range(11))), bench.finished, num_fetched=10, fetched_s=2.0)
    bench.events.run()
    assert bench.done == [("0", 2.016, 0.016)]


def test_a_pull_keeps_it() -> None:
    bench = Bench()
    bench.worker.num_pulls += 1
    assert not bench.worker.idle
    bench.worker.num_pulls -= 1
    assert bench.worker.idle
