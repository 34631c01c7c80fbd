"""Timeouts that grow while a peer is silent, and shrink once it answers."""

from tandem.gateway.patience import Patience


def test_silence_doubles_the_timeout_up_to_its_bound_and_a_quick_answer_ends_that() -> None:
    patience = Patience(0.5, 3.0)
    waited = [patience.timeout_s]
    for _ in range(4):
        patience.note_silence(patience.timeout_s)
        waited.append(patience.timeout_s)
    assert waited == [0.5, 1.0, 2.0, 3.0, 3.0]
    patience.note_answer(0.9)
    assert patience.timeout_s == 1.8
    patience.note_answer(0.01)
    assert patience.timeout_s == 0.5


def test_calls_side_by_side_count_once_and_a_refused_connection_not_at_all() -> None:
    patience = Patience(0.5, 8.0)
    for _ in range(3):
        patience.note_silence(0.5)
    patience.note_silence(0.001)
    assert patience.timeout_s == 1.0


def test_a_bound_below_the_least_timeout_leaves_it_alone() -> None:
    patience = Patience(0.5, 0.0)
    patience.note_silence(0.5)
    assert patience.timeout_s == 0.5
