"""Words of the list are found wherever they stand, and nothing else is."""

import asyncio
import random
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import pytest

from tandem.core.errors import ConfigurationError
from tandem.gateway.moderation.base import ModerationVerdict
from tandem.gateway.moderation.blocklist import Blocklist, _folds


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


def passes_plainly(terms: Sequence[str], text: str, num_judged: int, may_go_on: bool) -> bool:
    """Reference for the blocklist: one regular expression of all terms."""
    words = sorted({" ".join(term.split()) for term in terms} - {""})
    spelled = (re.escape(word).replace(r"\ ", r"\s{1,8}") for word in sorted(words, key=len, reverse=True))
    found = re.finditer(rf"(?<!\w)(?:{'|'.join(spelled)})(?!\w)", text, re.IGNORECASE)
    return not any(match.end() > num_judged and not (may_go_on and match.end() == len(text)) for match in found)


LETTERS = ("ab", "aAB_1", "iI\u0130\u0131", "\u03b9\u0399\u0345\u1fbe", "sS\u017f\u00df\u1e9e", "kK\u212a.")


@pytest.mark.parametrize("seed", range(100))
def test_it_finds_what_one_expression_of_all_terms_finds(seed: int) -> None:
    """Of few characters, so that terms overlap; U+0345 is no letter, and a case of one."""
    rng = random.Random(seed)
    letters = rng.choice(LETTERS)
    others = rng.choice([" ", " +", " \t\n.-", " \u00a0'", " \x1c\u2003\\("])
    pool = letters * 2 + others * rng.randint(1, 3)
    terms = ["".join(rng.choices(pool, k=rng.randint(1, 6))) for _ in range(rng.randint(1, 12))] + ["a"]
    blocklist = Blocklist(terms)
    for _ in range(20):
        pieces = [rng.choice([rng.choice(pool), rng.choice(terms), " " * rng.randint(1, 10)]) for _ in range(8)]
        text = "".join(pieces)
        text = rng.choice([text, text.upper(), text.lower()])
        for may_go_on in (False, True):
            for num_judged in range(len(text) + 1):
                expected = passes_plainly(terms, text, num_judged, may_go_on)
                asked = blocklist.judge(text, num_judged=num_judged, may_go_on=may_go_on)
                assert judged_at_once(asked) is expected, (terms, text, num_judged, may_go_on)


def judged_at_once(asked: Coroutine[Any, Any, ModerationVerdict]) -> bool:
    """Whether it passes, by a judge that waits for nothing."""
    with pytest.raises(StopIteration) as done:
        asked.send(None)
    verdict: ModerationVerdict = done.value.value
    return verdict.passes


def test_characters_are_the_same_as_for_an_expression_that_ignores_case() -> None:
    cased = [
        char for char in map(chr, range(sys.maxunicode + 1)) if {char.lower(), char.upper(), char.title()} != {char}
    ]
    text, same = "".join(cased), defaultdict(list)
    for char in cased:
        same[char.translate(_folds())].append(char)
    for char in cased:
        assert re.findall(re.escape(char), text, re.IGNORECASE) == same[char.translate(_folds())]


class Counted(list[str]):
    """Counts its items' readings."""

    num_read = 0

    def __getitem__(self, index: SupportsIndex) -> str:  # type: ignore[override]
        self.num_read += 1
        return super().__getitem__(index)


def test_ten_thousand_terms_take_a_few_steps_a_word() -> None:
    blocklist = Blocklist([f"the term {number}" for number in range(10_000)])
    terms = blocklist._terms = Counted(blocklist._terms)
    assert passes(blocklist, "the term that is none " * 20)
    assert 0 < terms.num_read <= 16 * 5 * 20


def test_long_texts_are_judged_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    is_in = Blocklist._is_in

    def noted(*args: Any) -> bool:
        threads.append(threading.get_ident())
        return is_in(*args)

    monkeypatch.setattr(Blocklist, "_is_in", noted)
    assert not passes(Blocklist(["bad"]), "so good " * 1000 + "bad")
    assert passes(Blocklist(["bad"]), "so good")
    assert threads[0] != threads[1] == threading.get_ident()
