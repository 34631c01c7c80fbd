"""Numbers of calls, against a set of all that were taken."""

from hypothesis import given
from hypothesis import strategies as st

from tandem.rpc.call_window import SIZE, CallWindow


@given(st.lists(st.integers(1, 40) | st.integers(SIZE - 3, SIZE + 40) | st.integers(1, 10 * SIZE)))
def test_each_number_is_taken_once_and_none_that_is_too_old(numbers: list[int]) -> None:
    window, taken, highest = CallWindow(), set[int](), 0
    for number in numbers:
        assert window.accept(number) is (number not in taken and number > highest - SIZE)
        taken.add(number)
        highest = max(highest, number)


def test_calls_may_overtake_each_other() -> None:
    window = CallWindow()
    assert all(window.accept(number) for number in (3, 1, 2, SIZE + 3, 4))
    assert not any(window.accept(number) for number in (1, 2, 3, 4, SIZE + 3))


def test_a_number_far_behind_costs_nothing() -> None:
    """It was shifted by the distance first, which a caller chooses: 10**17 raised MemoryError."""
    window = CallWindow()
    assert window.accept(10**17)
    assert not window.accept(1)
