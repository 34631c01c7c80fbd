"""The client against a real server: what it asks, how it counts, and what it refuses."""

import asyncio

import pytest

from bench.race.answer import Answer, WrongAnswerError
from bench.race.client import Client
from bench.race.system import Served
from bench.race.workloads import Prompt
from tandem.loadtest.failure import ExchangeError
from tests.unit.bench.race.fake_openai import FakeOpenAI, Script, listening

PROMPT = [11, 12, 13]
STALL_S = 0.05


def ask(app: FakeOpenAI, prompt: Prompt = PROMPT, num_output: int = 6) -> Answer:
    async def one() -> Answer:
        client = Client(Served(url, "m", ()), lambda prompt, num: {"ignore_eos": True, "min_tokens": num}, 20.0)
        try:
            return await client.ask(prompt, num_output)
        finally:
            await client.close()

    with listening(app) as url:
        return asyncio.run(one())


def test_it_asks_for_a_greedy_stream_of_token_ids() -> None:
    app = FakeOpenAI(Script())
    ask(app)
    assert app.bodies == [
        {
            "model": "m",
            "prompt": PROMPT,
            "max_tokens": 6,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "min_tokens": 6,
        }
    ]


def test_every_event_is_timed_and_counted() -> None:
    answer = ask(FakeOpenAI(Script()))
    assert answer.token_ids == (7, 8, 9, 10, 11, 12)
    assert sum(count for _, count in answer.arrivals) == 6
    times = [answer.sent_s, *(at_s for at_s, _ in answer.arrivals)]
    assert times == sorted(times)
    assert (answer.num_prompt, answer.num_output, answer.num_cached) == (3, 6, 4)


def test_events_with_several_tokens() -> None:
    answer = ask(FakeOpenAI(Script(per_event=6)), num_output=12)
    assert {count for _, count in answer.arrivals} <= {6, 12}
    assert sum(count for _, count in answer.arrivals) == 12


def test_a_server_that_tells_no_ids_is_counted_by_its_usage() -> None:
    answer = ask(FakeOpenAI(Script(per_event=2, tells_ids=False)))
    assert sum(count for _, count in answer.arrivals) == 3
    assert answer.token_ids == ()
    assert answer.num_output == 6


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (Script(extra_tokens=1), "usage says 7 of 6 answered tokens"),
        (Script(extra_tokens=-1), "usage says 5 of 6 answered tokens"),
        (Script(extra_prompt_tokens=1), "usage says 4 of 3 prompt tokens"),
        (Script(tells_usage=False), "usage says nothing of 6 answered tokens"),
        (Script(refuse_from=0), "it is broken"),
    ],
)
def test_an_answer_that_is_not_exact_is_refused(script: Script, words: str) -> None:
    with pytest.raises(WrongAnswerError, match=words):
        ask(FakeOpenAI(script))


def test_a_stream_that_just_stops_is_refused() -> None:
    with pytest.raises(ExchangeError, match="DONE"):
        ask(FakeOpenAI(Script(cut=True)))


def test_the_first_token_is_told_while_the_rest_is_held_and_the_gap_shows_it() -> None:
    app = FakeOpenAI(Script(hold_after=1))

    async def one() -> Answer:
        client = Client(Served(url, "m", ()), lambda prompt, num: {}, 20.0)
        begun = asyncio.Event()
        try:
            asking = asyncio.create_task(client.ask(PROMPT, 3, begun))
            await asyncio.wait_for(begun.wait(), 20)
            assert not asking.done()
            await asyncio.sleep(STALL_S)  # NOTE: the length of the stall, not a wait for anything
            app.resume.set()
            return await asking
        finally:
            await client.close()

    with listening(app) as url:
        answer = asyncio.run(one())
    first = next(iter(answer.gaps()))
    assert first.start_s == answer.sent_s + answer.ttft_s
    assert first.length_s >= STALL_S


def test_it_says_how_much_of_a_core_it_used() -> None:
    client = Client(Served("http://127.0.0.1:1", "m", ()), lambda prompt, num: {}, 1.0)
    assert sum(range(200_000)) > 0
    assert 0 < client.cores() <= 1.5
