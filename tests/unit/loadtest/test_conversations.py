"""Prompts are what lengths, seeds and traces say, and prefixes are shared where they should be."""

import json
from pathlib import Path
from typing import Any

from tandem.loadtest.conversations import GeneratedConversation, RecordedConversation, recorded_requests
from tandem.loadtest.load_request import LoadRequest
from tandem.loadtest.plan import Arrivals
from tandem.loadtest.token_text import TokenSource
from tandem.workload.lengths import Fixed, Uniform
from tandem.workload.trace import TraceRequest
from tests.unit.loadtest.scripted_server import load_plan

TOKENS = TokenSource(100, 999, seed=0)


def ids(ask: LoadRequest | None) -> list[int]:
    assert ask is not None
    found: list[int] = json.loads(b"[" + ask.prompt.text + b"]")
    assert len(found) == ask.prompt.count
    return found


def talk(number: int, max_model_len: int | None = None, **options: Any) -> GeneratedConversation:
    return GeneratedConversation(load_plan("", **options), TOKENS, number, max_model_len)


def recorded(*block_ids: int, length: int, scale: float = 1.0, number: int = 0) -> list[int]:
    request = TraceRequest(0.0, length, 10, block_ids)
    return ids(RecordedConversation(request, TOKENS, number, scale).next_request(()))


def test_the_same_number_says_the_same() -> None:
    options: dict[str, Any] = {"prompt_lengths": Uniform(5, 50), "output_lengths": Uniform(1, 9)}
    first = talk(3, **options).next_request(())
    assert first == talk(3, **options).next_request(())
    assert first != talk(4, **options).next_request(())
    assert first != talk(3, seed=1, **options).next_request(())


def test_a_share_of_the_prompt_is_shared() -> None:
    options: dict[str, Any] = {"prompt_lengths": Fixed(40), "shared_prefix_share": 0.5}
    one, two = ids(talk(0, **options).next_request(())), ids(talk(1, **options).next_request(()))
    assert len(one) == len(two) == 40
    assert one[:20] == two[:20]
    assert one[20:] != two[20:]
    starts = {tuple(ids(talk(n, num_prefixes=3, **options).next_request(()))[:20]) for n in range(30)}
    assert len(starts) == 3


def test_a_turn_holds_all_before_it() -> None:
    conversation = talk(0, turns=Fixed(3))
    first = ids(conversation.next_request(()))
    second = ids(conversation.next_request((7, 8)))
    third = ids(conversation.next_request((9,)))
    assert len(first) == 8
    assert second[:10] == [*first, 7, 8]
    assert len(second) == 18
    assert third[:19] == [*second, 9]
    assert conversation.next_request((1,)) is None


def test_a_conversation_ends_before_it_outgrows_the_context() -> None:
    conversation = talk(0, max_model_len=22, turns=Fixed(9))
    assert conversation.next_request(()) is not None
    assert conversation.next_request((1,)) is not None  # 8 + 1 + 8 prompt tokens, 4 of an answer
    assert conversation.next_request((2,)) is None
    assert talk(0, max_model_len=2).next_request(()) is not None, "what can never fit is for the server to refuse"


def test_equal_blocks_are_equal_tokens_and_others_are_not() -> None:
    one, two = recorded(5, 6, 7, length=1300), recorded(5, 6, 8, length=1400, number=1)
    assert len(one) == 1300
    assert one[:1024] == two[:1024]
    assert one[1024:] != two[1024:1300]
    assert recorded(6, length=100) == one[512:612], "a part of a block is its beginning"


def test_blocks_shrink_with_prompts() -> None:
    one, two = recorded(5, 6, 7, length=1300, scale=1 / 32), recorded(5, 6, 9, length=1500, scale=1 / 32)
    assert len(one) == 32 + round(276 / 32)
    assert one[:32] == two[:32]
    assert recorded(5, length=3, scale=1 / 512) == recorded(5, length=1)
    answer = RecordedConversation(TraceRequest(0, 100, 10, (1,)), TOKENS, 0, 0.25).next_request(())
    assert answer is not None
    assert answer.num_output_tokens == 2


def test_requests_without_blocks_share_nothing() -> None:
    assert len(recorded(length=50)) == 50
    assert recorded(length=50) != recorded(length=50, number=1)
    assert recorded(length=50) == recorded(length=50)


def test_a_recorded_request_is_asked_once() -> None:
    conversation = RecordedConversation(TraceRequest(0, 5, 5), TOKENS, 0, 1.0)
    assert conversation.next_request(()) is not None
    assert conversation.next_request((1,)) is None


def test_ticks_are_spread_and_times_scaled(tmp_path: Path) -> None:
    lines = [{"timestamp": 3000 * (n // 5), "input_length": 10, "output_length": 2, "hash_ids": [n]} for n in range(15)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    plan = load_plan("", arrivals=Arrivals(trace=tmp_path / "t.jsonl", time_scale=0.5))
    times = [request.arrival_s for request in recorded_requests(plan)]
    assert times == sorted(times)
    assert len(set(times)) == 15
    assert [int(time // 1.5) for time in times] == [n // 5 for n in range(15)]


def test_recorded_seconds_are_not_spread(tmp_path: Path) -> None:
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.5,9,4", "2023-11-16 18:15:48.5,9,4"]
    (tmp_path / "t.csv").write_text("\n".join(rows))
    plan = load_plan("", arrivals=Arrivals(trace=tmp_path / "t.csv", time_scale=2.0))
    assert [request.arrival_s for request in recorded_requests(plan)] == [0.0, 4.0]
