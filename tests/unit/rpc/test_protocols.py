"""Choice of protocol between two releases: the newest common one, and a clear error where there is none."""

import pytest

from tandem.core.errors import IncompatibleProtocolError
from tandem.rpc.protocols import newest_common


@pytest.mark.parametrize(
    ("theirs", "ours", "spoken"),
    [((2, 2), (2, 2), 2), ((2, 3), (3, 4), 3), ((3, 4), (2, 3), 3), ((1, 9), (4, 5), 5), ((4, 5), (1, 9), 5)],
)
def test_the_newest_common_one_is_spoken(theirs: tuple[int, int], ours: tuple[int, int], spoken: int) -> None:
    assert newest_common(theirs, ours) == spoken


@pytest.mark.parametrize(("theirs", "ours"), [((1, 1), (2, 3)), ((4, 9), (2, 3)), ((0, 0), (2, 3)), ((3, 2), (2, 3))])
def test_without_a_common_one_both_ranges_are_named(theirs: tuple[int, int], ours: tuple[int, int]) -> None:
    words = f"speaks protocols {theirs[0]} to {theirs[1]}, this process {ours[0]} to {ours[1]}; run releases"
    with pytest.raises(IncompatibleProtocolError, match=words):
        newest_common(theirs, ours)
