"""Words of the list are found wherever they stand, and nothing else is."""

import asyncio
from pathlib import Path

import pytest

from tandem.core.errors import ConfigurationError
from tandem.gateway.moderation.blocklist import Blocklist


def passes(blocklist: Blocklist, text: str, *, num_judged: int = 0, may_go_on: bool = False) -> bool:
    return asyncio.run(blocklist.judge(text, num_judged=num_judged, may_go_on=may_go_on)).passes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a bad day", False),
        ("BAD", False),
        ("badger", True),
        ("notbad", True),
        ("very wicked   \n word", False),
        ("wicked sword", True),
        ("wicked", True),
        ("", True),
        ("c++ is fine, c+ is not: c+.", False),
    ],
)
def test_whole_words_in_any_case_are_found(text: str, expected: bool) -> None:
    assert passes(Blocklist(["bad", "wicked word", "c+"]), text) is expected


def test_a_word_at_an_open_end_may_become_another() -> None:
    blocklist = Blocklist(["bad"])
    assert passes(blocklist, "so bad", may_go_on=True)
    assert not passes(blocklist, "so bad.", may_go_on=True)


def test_what_passed_before_is_not_found_again() -> None:
    """A word that was part of a longer one looks whole once the text before it is forgotten."""
    assert passes(Blocklist(["bad"]), "bad is what was left of notbad", num_judged=3)
    assert not passes(Blocklist(["bad"]), "bad bad", num_judged=3)


def test_a_file_has_one_term_a_line(tmp_path: Path) -> None:
    file = tmp_path / "words"
    file.write_text("# words\n\nbad\n  two  words \n")
    blocklist = Blocklist.load(str(file))
    assert not passes(blocklist, "Two words")
    assert passes(blocklist, "# words")


def test_an_empty_list_lets_everything_pass() -> None:
    assert passes(Blocklist([]), "anything")


@pytest.mark.parametrize("terms", [["x" * 300], [str(number) for number in range(10_001)]])
def test_what_is_too_much_is_refused(terms: list[str]) -> None:
    with pytest.raises(ConfigurationError):
        Blocklist(terms)


def test_a_file_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nowhere"):
        Blocklist.load(str(tmp_path / "nowhere"))
