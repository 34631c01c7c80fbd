"""The language checks: each rule on small texts, and the whole check on small checkouts with and without git."""

import subprocess
import time
from pathlib import Path

import pytest

from tools.prose import rules
from tools.prose.check import BASE, KNOWN, check, shrink
from tools.prose.markdown import sentences_of

ROOT = Path(__file__).parents[3]
LONG = " ".join(["A", *["word"] * 40]) + "."
CLEAN = '"""Block pool: the blocks and their states."""\n'


@pytest.mark.parametrize("word", ["Who", "what", "How", "Which", "Whom", "Whose", "Where", "When", "Why", "Whatever"])
def test_a_first_line_that_begins_with_a_question_word_is_found(word: str) -> None:
    (found,) = rules.first_line("a.py", f'"""{word} owns a block."""\nimport os\n')
    assert found.text == f"{word} owns a block."


@pytest.mark.parametrize(
    "source",
    [
        CLEAN,
        "",
        "# What is this?\nimport os\n",
        '"""Whereabouts of blocks."""\n',
        'x = 1\n"""What is no docstring."""\n',
    ],
)
def test_other_first_lines_pass(source: str) -> None:
    assert not list(rules.first_line("a.py", source))


def test_a_docstring_after_comments_is_read() -> None:
    assert list(rules.first_line("a.py", '#!/usr/bin/env python3\n# Note.\n\n"""\nHow it is."""\n'))


def test_first_lines_of_classes_and_functions_are_read() -> None:
    source = '''
class Pool:
    """What holds blocks."""

    async def take(self):
        def give():
            """How one is
            given.
            """

try:
    import fast
except ImportError:
    def load():
        "Where it is."

def keep():
    """
    Whose it is.
    """
'''
    found = rules.definition_lines("a.py", source)
    assert sorted(each.place for each in found) == ["a.py:15", "a.py:18", "a.py:3", "a.py:7"]


def test_other_first_lines_of_functions_pass() -> None:
    source = '''
def is_free():
    """Whether it is free. What is not is pinned."""

def take():
    """Block.

    What it has.
    """
    x = 1
    """What is no docstring."""
'''
    assert not list(rules.definition_lines("a.py", source))


def test_a_subject_may_have_72_characters() -> None:
    assert not list(rules.long_subject("abc", "x" * 72))
    (found,) = rules.long_subject("abc", "x" * 73)
    assert "73 characters" in str(found)


def test_a_sentence_may_have_40_words() -> None:
    assert not list(rules.long_sentences("a.md", " ".join(["word"] * 40) + "."))
    (found,) = rules.long_sentences("a.md", f"First.\n\nSecond. {LONG}\n")
    assert found.place == "a.md:3"
    assert found.text == LONG


@pytest.mark.parametrize(
    ("document", "sentences"),
    [
        ("# Title\nOne two. Three\nfour.\n\nFive", ["One two.", "Three four.", "Five"]),
        ("- one\n- two\n  more\n1. three\n", ["one", "two more", "three"]),
        ("```\nnot a sentence. Nor this.\n```\nText.", ["Text."]),
        ("| a b | c |\n|---|---|\n| d. E | `x` |\n", ["a b", "c", "d.", "E", "`x`"]),
        ("See [the log](a.md) (e.g. Tables).", ["See the log (e.g. Tables)."]),
        ("**Bold.** Next. `code` last.", ["**Bold.", "Next.", "`code` last."]),
        ("Costs 1.5 ms. A version 3.11 too.", ["Costs 1.5 ms.", "A version 3.11 too."]),
        ("a <!-- hidden. Text --> b", ["a b"]),
    ],
)
def test_documents_are_split_into_sentences(document: str, sentences: list[str]) -> None:
    assert [each.text for each in sentences_of(document)] == sentences


def checkout(root: Path, **files: str) -> Path:
    """Writes files, named with `__` for `/`, and an empty list of known findings."""
    for name, text in {"tools/prose/known.txt": "", **files}.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def git(root: Path, *words: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *words], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_without_git_files_are_read_and_commits_are_not(tmp_path: Path) -> None:
    root = checkout(tmp_path, **{"a.py": '"""What it is."""\n', ".venv__b.py": '"""What it is not."""\n'})
    verdict = check(root)
    assert [each.place for each in verdict.new] == ["a.py"]


def test_definitions_are_read_except_in_generated_files(tmp_path: Path) -> None:
    source = 'def a():\n    """What it is."""\n'
    root = checkout(tmp_path, **{"tandem__a.py": source, "tests__unit__a.py": source, "tandem__rpc__v1__a.py": source})
    assert sorted(each.place for each in check(root).new) == ["tandem/a.py:2", "tests/unit/a.py:2"]


def test_only_documents_for_readers_are_read(tmp_path: Path) -> None:
    root = checkout(tmp_path, **{"README.md": LONG, "docs__a__b.md": LONG + " B.", "demo__card.md": LONG})
    assert sorted(each.place for each in check(root).new) == ["README.md:1", "docs/a/b.md:1"]


def test_a_known_finding_is_a_warning_until_its_text_changes(tmp_path: Path) -> None:
    root = checkout(tmp_path, **{"README.md": LONG})
    (finding,) = check(root).new
    (root / KNOWN).write_text(f"# comment\n{finding.key}\n")
    assert check(root).passed
    (root / "README.md").write_text(LONG.replace(".", " too."))
    verdict = check(root)
    assert len(verdict.new) == 1
    assert "is gone" in verdict.list_errors[0]


def test_the_list_loses_what_is_gone(tmp_path: Path) -> None:
    root = checkout(tmp_path, **{"README.md": LONG})
    (finding,) = check(root).new
    (root / KNOWN).write_text(f"# comment\n{finding.key}\nfirst line 0123 What it was.\n")
    assert shrink(root) == 1
    assert (root / KNOWN).read_text() == f"# comment\n{finding.key}\n"


def test_the_list_may_not_grow_beyond_that_of_main(tmp_path: Path) -> None:
    root = checkout(tmp_path, **{"README.md": LONG})
    git(root, "init", "-q", "-b", "main")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "Begin")
    git(root, "checkout", "-q", "-b", "work")
    (finding,) = check(root).new
    (root / KNOWN).write_text(f"{finding.key}\n")
    git(root, "commit", "-q", "-a", "-m", "Allow it")
    verdict = check(root)
    assert not verdict.new
    assert "may only shrink" in verdict.list_errors[0]


def test_subjects_are_checked_after_the_base_only(tmp_path: Path) -> None:
    root = checkout(tmp_path, **{"a.py": CLEAN})
    git(root, "init", "-q", "-b", "main")
    git(root, "add", "-A")
    git(root, "commit", "-q", "--date", "2026-11-29T06:30:00+01:00", "-m", "o" * 80)
    git(root, "commit", "-q", "--allow-empty", "--date", "2026-11-29T06:30:00+00:00", "-m", "n" * 80)
    assert [each.text for each in check(root, "2026-11-29T06:00:00+00:00").new] == ["n" * 80]
    git(root, "commit", "-q", "--amend", "--allow-empty", "--date", "2026-11-29T06:30:00+00:00", "-m", "r" * 80)
    assert [each.text for each in check(root, BASE).new] == ["r" * 80], "also after the commits have got other names"


def test_this_repository_passes_within_three_seconds() -> None:
    began = time.process_time()
    verdict = check(ROOT)
    assert not verdict.list_errors
    assert not verdict.new
    assert time.process_time() - began < 3
