"""Draft lengths: as many as pay, by acceptance, number of rows and measured cost."""

import pytest

from tandem.engine.drafts.lengths import MAX_SLOWDOWN, MIN_GAIN, Guess, choose_lengths


def weight_bound(rows: int) -> float:
    """A row costs 5 % of reading the weights."""
    return 1.0 + 0.05 * rows


def compute_bound(rows: int) -> float:
    return 0.01 + rows


def test_sure_guesses_are_taken_whole_where_rows_are_cheap() -> None:
    assert choose_lengths([Guess(7, 0.99)], 1, weight_bound) == [7]


def test_nothing_is_checked_where_each_row_costs_a_step() -> None:
    assert choose_lengths([Guess(7, 0.95)] * 64, 64, compute_bound) == [0] * 64


def test_the_likelier_guess_is_longer() -> None:
    long, short = choose_lengths([Guess(7, 0.9), Guess(7, 0.5)], 2, weight_bound)
    assert long > short > 0


@pytest.mark.parametrize(("num_rows", "most"), [(1, 7), (8, 7), (64, 3)])
def test_lengths_shrink_with_the_batch(num_rows: int, most: int) -> None:
    """Rows are free up to 16, as in kernels bound by memory; beyond that each costs its share."""
    lengths = choose_lengths([Guess(7, 0.7)] * num_rows, num_rows, lambda rows: max(16.0, rows))
    assert max(lengths) <= most
    assert sum(lengths) >= (7 if num_rows == 1 else 8 if num_rows == 8 else 0)


def test_the_choice_is_the_best_of_all() -> None:
    """Against a search through every pair of lengths."""

    def seconds(rows: int) -> float:
        return (1.0, 1.0, 1.02, 1.3, 1.32, 1.34, 1.9, 2.2, 2.3)[rows]

    guesses = [Guess(3, 0.8), Guess(3, 0.6)]

    def rate(lengths: list[int]) -> float:
        right = sum(g.acceptance**p for g, n in zip(guesses, lengths, strict=True) for p in range(1, n + 1))
        return (2 + right) / seconds(2 + sum(lengths))

    best = max(([a, b] for a in range(4) for b in range(4)), key=rate)
    assert rate(best) > MIN_GAIN * rate([0, 0])
    assert choose_lengths(guesses, 2, seconds) == best


def test_a_request_without_guesses_is_hardly_slowed() -> None:
    """In a batch of four, three answers that repeat a text made the fourth 16 % later than without drafts."""

    def seconds(rows: int) -> float:
        return 1.0 + 0.02 * rows

    lengths = choose_lengths([Guess(7, 0.9)] * 3, 4, seconds)
    assert sum(lengths) > 0
    assert seconds(4 + sum(lengths)) <= MAX_SLOWDOWN * seconds(4)
    assert sum(choose_lengths([Guess(7, 0.9)] * 4, 4, seconds)) > 3 * sum(lengths)


def test_a_gain_that_estimates_may_be_wrong_by_is_left() -> None:
    assert choose_lengths([Guess(1, 0.5)], 1, lambda rows: 1.0 if rows == 1 else 1.5 / 1.02) == [0]
