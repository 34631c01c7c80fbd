import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.routing.speed import PrefillWork
from tests.unit.routing.builders import FAST


@given(num_tokens=st.integers(1, 100_000), share=st.floats(0, 1))
def test_both_ways_to_price_a_prompt_agree(num_tokens: int, share: float) -> None:
    num_cached = int(share * (num_tokens - 1))
    work = PrefillWork.of(num_tokens, num_cached)
    assert FAST.prefill.prompt_ms(num_tokens, num_cached) == pytest.approx(FAST.prefill.ms(work))


def test_work_adds_up() -> None:
    first, second = PrefillWork.of(1000, 200), PrefillWork.of(50, 0)
    assert FAST.prefill.ms(first + second) == pytest.approx(FAST.prefill.ms(first) + FAST.prefill.ms(second))


def test_computing_a_prompt_in_two_parts_is_the_same_attention() -> None:
    whole = PrefillWork.of(1000, 0)
    parts = PrefillWork.of(400, 0) + PrefillWork.of(1000, 400)
    assert (whole.num_tokens, whole.num_pairs) == (parts.num_tokens, parts.num_pairs)
