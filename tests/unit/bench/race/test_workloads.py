"""Requests of the workloads, their times, and the figures made of answers; the server is a function."""

import asyncio
from dataclasses import replace

import pytest

from bench.race.answer import Answer
from bench.race.metrics import HEADLINES, METRICS
from bench.race.workloads import WORKLOADS, Batch, Burst, Conversations, Played, Prompt, Workload, gaps_between

SMALL = Batch("batch", "batch", num_requests=6, concurrency=3, own=5, output=4, shared=7)
TALK = Conversations("turns", "turns", users=2, turns=3, first=6, later=2, output=3)
BURST = Burst("burst", "burst", streams=3, stream_prompt=4, stream_output=5, burst=2, burst_prompt=9)


class FakeServer:
    """Answers in `now_s`, which moves on by one at each event; each request yields to the others in between."""

    def __init__(self) -> None:
        self.asked: list[tuple[Prompt, int]] = []
        self.now_s = 0.0
        self.num_open = 0
        self.most_open = 0
        self.fail_at: int | None = None
        self.num_begun = 0
        self.begun_before_long: list[int] = []

    async def ask(self, prompt: Prompt, num_output: int, begun: asyncio.Event | None = None) -> Answer:
        self.asked.append((prompt, num_output))
        if len(self.asked) == self.fail_at:
            raise ValueError("it broke")
        if num_output == 1:
            self.begun_before_long.append(self.num_begun)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        sent_s, arrivals = self.now_s, []
        for index in range(num_output):
            for _ in range(len(self.asked)):  # one after the other, as requests that came one after the other
                await asyncio.sleep(0)
            self.now_s += 1.0
            arrivals.append((self.now_s, 1))
            if begun is not None and index == 0:
                self.num_begun += 1
                begun.set()
        self.num_open -= 1
        ids = tuple(1000 + len(self.asked) + i for i in range(num_output))
        return Answer(sent_s, tuple(arrivals), len(prompt), num_output, ids)


def play(workload: Workload, seed: str = "s", server: FakeServer | None = None) -> tuple[FakeServer, Played]:
    server = server or FakeServer()
    return server, asyncio.run(workload.play(server.ask, seed))


def test_a_batch_is_a_closed_loop_of_its_width() -> None:
    server, played = play(SMALL)
    assert len(played.answers) == 6
    assert server.most_open == 3
    assert {(len(prompt), num) for prompt, num in server.asked} == {(12, 4)}


def test_prompts_share_what_they_should_and_no_more() -> None:
    prompts = [prompt for prompt, _ in play(SMALL)[0].asked]
    assert len({tuple(prompt[:7]) for prompt in prompts}) == 1
    assert len({tuple(prompt[7:]) for prompt in prompts}) == 6


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.key)
def test_the_seed_decides_every_prompt(workload: Workload) -> None:
    """Two systems get the same in one round, and nothing of it comes again in another or in the warm-up."""
    first, again, other = (play(workload, seed)[0].asked for seed in ("1", "1", "2"))
    key = (lambda asked: [prompt for prompt, _ in asked]) if workload.key != "turns" else _first_turns
    assert sorted(key(first)) == sorted(key(again))
    assert not {tuple(prompt[:16]) for prompt in key(first)} & {tuple(prompt[:16]) for prompt in key(other)}
    assert all(10 <= token < 4000 for prompt in key(first) for token in prompt)


def _first_turns(asked: list[tuple[Prompt, int]]) -> list[Prompt]:
    shortest = min(len(prompt) for prompt, _ in asked)
    return [prompt for prompt, _ in asked if len(prompt) == shortest]


def test_a_conversation_goes_on_with_what_was_answered() -> None:
    server, played = play(replace(TALK, users=1))
    (first, _), (second, _), (third, _) = server.asked
    assert (len(first), len(second), len(third)) == (6, 11, 16)
    assert second[:9] == [*first, *played.answers[0].token_ids]
    assert third[:14] == [*second, *played.answers[1].token_ids]


def test_users_talk_at_once_and_wait_for_their_own_answers() -> None:
    server, played = play(TALK)
    assert server.most_open == 2
    assert len(played.answers) == 6


def test_a_burst_waits_until_every_stream_has_begun() -> None:
    server, played = play(BURST)
    assert server.begun_before_long == [3, 3]
    assert [answer.num_prompt for answer in played.burst] == [9, 9]
    assert len(played.answers) == 3
    assert played.burst_s == min(answer.sent_s for answer in played.burst)


def test_only_gaps_that_touch_the_burst_count() -> None:
    stream = Answer(0.0, ((1.0, 1), (2.0, 1), (5.0, 1), (6.0, 1), (7.0, 1)), 4, 5)
    played = Played([stream], [Answer(3.0, ((5.5, 1),), 9, 1)], burst_s=3.0)
    assert [gap.length_s for gap in gaps_between(played.answers, 3.0, 5.5)] == [3.0, 1.0]
    figures = BURST.figures(played)
    assert figures["ITL p99"] == pytest.approx(3000.0)
    assert figures["TTFT p50"] == pytest.approx(2500.0)
    assert figures["prompt rate"] == pytest.approx(2 * 9 / 2.5)


def test_a_batch_is_judged_by_what_it_is_about() -> None:
    answers = [Answer(0.0, ((2.0, 1), (3.0, 1), (4.0, 1), (5.0, 1)), 12, 4)] * 6
    figures = SMALL.figures(Played(answers))
    assert figures["output rate"] == pytest.approx(24 / 5)
    assert figures["TPOT p50"] == figures["ITL p99"] == pytest.approx(1000.0)
    prompts = replace(SMALL, output=1).figures(Played([Answer(0.0, ((2.0, 1),), 12, 1)] * 6))
    assert prompts == {"TTFT p50": 2000.0, "prompt rate": 36.0}


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.key)
def test_every_workload_has_its_headline_and_known_figures(workload: Workload) -> None:
    figures = workload.figures(play(workload)[1])
    assert HEADLINES[workload.key] in figures
    assert figures.keys() <= METRICS.keys()
    assert all(value > 0 for value in figures.values())


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.key)
def test_a_warm_up_is_as_wide_and_not_longer(workload: Workload) -> None:
    (server, _), (short, _) = play(workload), play(workload.warm_up())
    assert short.most_open >= min(server.most_open, 8)
    assert sum(num for _, num in short.asked) <= sum(num for _, num in server.asked)


@pytest.mark.parametrize("workload", [SMALL, TALK, BURST], ids=lambda workload: workload.key)
def test_one_wrong_answer_ends_the_workload(workload: Workload) -> None:
    server = FakeServer()
    server.fail_at = 2
    with pytest.raises(ValueError, match="it broke"):
        play(workload, server=server)
