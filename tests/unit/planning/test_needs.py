import pytest

from tandem.planning.needs import MAX_WORKERS, fewest, largest_need


@pytest.mark.parametrize("enough", [1, 2, 3, 4, 5, 8, 9, 1000, MAX_WORKERS])
def test_the_fewest_that_suffice_are_found(enough: int) -> None:
    assert fewest(lambda num: num >= enough) == enough


def test_what_no_count_satisfies_is_none() -> None:
    assert fewest(lambda num: False) is None


def test_the_need_that_asks_for_most_is_named_and_unmet_ones_are_told() -> None:
    needs = {"a": lambda num: num >= 3, "b": lambda num: num >= 7, "c": lambda num: False}
    num, limit, unmet = largest_need(needs)
    assert (num, limit) == (7, "b")
    assert unmet == [f"c: {MAX_WORKERS:,} workers do not suffice"]
    assert largest_need({"a": lambda num: True}) == (1, "one is enough", [])


def test_where_no_need_can_be_met_all_are_told_and_the_count_is_the_most() -> None:
    num, limit, unmet = largest_need({"a": lambda num: False, "b": lambda num: False})
    assert (num, limit) == (MAX_WORKERS, "a")
    assert unmet == [f"{name}: {MAX_WORKERS:,} workers do not suffice" for name in "ab"]
