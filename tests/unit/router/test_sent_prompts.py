"""Prompts sent a moment ago count as held by whom they were sent to, and by nobody else, for a moment."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tandem.router.sent_prompts import SentPrompts


def chain(tokens: Sequence[int]) -> list[bytes]:
    """Chained like real hashes: each names everything before it."""
    return [bytes(tokens[: end + 1]) for end in range(len(tokens))]


def test_what_was_sent_is_credited_as_far_as_the_prompts_agree() -> None:
    sent = SentPrompts()
    sent.sent("a", chain([1, 2, 3, 4]), ["p0", "d0"], 10.0)
    assert sent.credit(chain([1, 2, 3, 9, 9]), {}, 10.0) == {"p0": 3, "d0": 3}
    assert sent.credit(chain([1, 2]), {}, 10.0) == {"p0": 2, "d0": 2}
    assert sent.credit(chain([2, 2, 3]), {"p1": 1}, 10.0) == {"p1": 1}
    assert sent.credit([], {}, 10.0) == {}


def test_what_the_index_knows_stays_and_is_not_changed() -> None:
    sent = SentPrompts()
    sent.sent("a", chain([1, 2, 3]), ["p0", "p1"], 10.0)
    known = {"p0": 5, "p1": 1, "p2": 4}
    assert sent.credit(chain([1, 2, 3, 4, 5]), known, 10.0) == {"p0": 5, "p1": 3, "p2": 4}
    assert known == {"p0": 5, "p1": 1, "p2": 4}


def test_where_only_some_blocks_can_be_gone_on_from_the_last_of_them_counts() -> None:
    sent = SentPrompts()
    sent.sent("r", chain(range(20)), ["p0"], 0.0, (4, 9, 19))
    for num_common, credited in ((20, 19), (18, 9), (9, 9), (4, 4), (3, 1)):
        assert sent.credit(chain(range(num_common)), {"p0": 1}, 0.0) == {"p0": credited}


def test_it_is_forgotten_after_its_window() -> None:
    sent = SentPrompts(window_s=2.0)
    sent.sent("a", chain([1, 2]), ["p0"], 10.0)
    sent.sent("b", chain([1]), ["p1"], 11.0)
    assert sent.credit(chain([1, 2]), {}, 12.0) == {"p0": 2, "p1": 1}
    assert sent.credit(chain([1, 2]), {}, 12.5) == {"p1": 1}
    assert len(sent) == 1


def test_a_request_that_is_sent_again_counts_where_it_is_now() -> None:
    sent = SentPrompts()
    sent.sent("a", chain([1, 2]), ["p0"], 10.0)
    sent.sent("a", chain([1, 2]), ["p1"], 10.5)
    assert sent.credit(chain([1, 2]), {}, 11.0) == {"p1": 2}
    sent.sent("a", [], ["p2"], 11.0)
    assert sent.credit(chain([1, 2]), {}, 11.0) == {}


def test_a_prompt_that_was_not_computed_is_forgotten_at_once() -> None:
    sent = SentPrompts()
    sent.sent("a", chain([1, 2]), ["p0"], 10.0)
    sent.forget("a")
    sent.forget("never sent")
    assert sent.credit(chain([1, 2]), {}, 10.0) == {}


def test_only_the_latest_prompts_are_kept() -> None:
    sent = SentPrompts(max_prompts=2)
    for index, name in enumerate("abc"):
        sent.sent(name, chain([1]), [name], 10.0 + index / 10)
    assert sent.credit(chain([1]), {}, 10.3) == {"b": 1, "c": 1}


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=6))
def test_credit_equals_a_comparison_token_by_token(asked: list[int], prompts: list[list[int]]) -> None:
    sent = SentPrompts()
    expected: dict[str, int] = {}
    for index, prompt in enumerate(prompts):
        sent.sent(str(index), chain(prompt), [f"w{index % 2}"], 10.0)
        num_common = 0
        while num_common < min(len(asked), len(prompt)) and asked[num_common] == prompt[num_common]:
            num_common += 1
        if num_common:
            expected[f"w{index % 2}"] = max(num_common, expected.get(f"w{index % 2}", 0))
    assert sent.credit(chain(asked), {}, 10.0) == expected
