"""Applies the rules to a checkout and separates new findings from known ones."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.prose import rules
from tools.prose.history import History

KNOWN = "tools/prose/known.txt"
# Commits of authors before this time are not checked. NOTE: a time, since a commit's name changes when its branch is
# rewritten; the check then found no base and checked nothing.
BASE = "2026-11-29T06:00:00+00:00"
GENERATED = "tandem/rpc/v1/"


@dataclass(frozen=True)
class Verdict:
    """Findings that fail the check, findings that are known, and what is wrong with the list of known ones."""

    new: list[rules.Finding]
    known: list[rules.Finding]
    list_errors: list[str]

    @property
    def passed(self) -> bool:
        return not (self.new or self.list_errors)


def check(root: Path, base: str = BASE) -> Verdict:
    """Reads the checkout at `root`. Without git commits are not checked. `base`: an ISO time with its zone."""
    history = History(root)
    findings = list(_findings(root, history, base))
    listed = known_keys(_text(root / KNOWN))
    found = {each.key for each in findings}
    stale = [key for key in listed if key not in found]
    earlier = history.before(KNOWN)
    added = [] if earlier is None else sorted(set(listed) - set(known_keys(earlier)))
    return Verdict(
        new=[each for each in findings if each.key not in listed],
        known=[each for each in findings if each.key in listed],
        list_errors=[
            *(f"{KNOWN}: this finding is gone, remove its line (or run with --shrink): {key}" for key in stale),
            *(f"{KNOWN}: the list may only shrink, rewrite the text instead of adding: {key}" for key in added),
        ],
    )


def shrink(root: Path) -> int:
    """Removes from the list what is not found any more; returns how many lines went."""
    findings = {each.key for each in _findings(root, History(root), BASE)}
    text = _text(root / KNOWN)
    stale = {key for key in known_keys(text) if key not in findings}
    kept = [line for line in text.splitlines() if line not in stale]
    (root / KNOWN).write_text("".join(f"{line}\n" for line in kept))
    return len(stale)


def known_keys(text: str) -> dict[str, None]:
    """The list's keys in order. Lines that begin with `#` are comments."""
    return dict.fromkeys(line for line in text.splitlines() if line and not line.startswith("#"))


def _findings(root: Path, history: History, base: str) -> Iterator[rules.Finding]:
    for path in history.files(".py"):
        name = path.relative_to(root).as_posix()
        if not name.startswith(GENERATED):
            source = path.read_text()
            yield from rules.first_line(name, source)
            yield from rules.definition_lines(name, source)
    for path in history.files(".md"):
        name = path.relative_to(root).as_posix()
        if "/" not in name or name.startswith("docs/"):
            yield from rules.long_sentences(name, path.read_text())
    for commit, subject in history.subjects_since(base):
        yield from rules.long_subject(commit, subject)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
