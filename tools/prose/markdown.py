"""Splits a Markdown document into sentences. Code blocks, headings and link targets are left out; table cells count."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

CODE_SPAN = re.compile(r"`+[^`]*`+")
LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\([^()\s]*(?:\([^()]*\))?[^()]*\)")
LIST_ITEM = re.compile(r"^\s*(?:[-*+]|\d+\.)\s+")
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
# NOTE: a sentence ends at its full stop even where emphasis, a quotation or a bracket closes after it.
SENTENCE_END = re.compile(r"(?<=[.!?])[*_\")»”]*\s+(?=[*_\"(«“]*[A-Z0-9`])")
ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|cf|vs|etc|No|p)\.$")
WORD = re.compile(r"[^\W_]")


@dataclass(frozen=True)
class Sentence:
    """One sentence and the line on which its paragraph begins, from 1."""

    line: int
    text: str

    @property
    def num_words(self) -> int:
        """Words as a reader counts them: a code span is one word, and so is a number with its unit's sign."""
        plain = CODE_SPAN.sub(" code ", self.text)
        return sum(1 for word in plain.split() if WORD.search(word))


def sentences_of(document: str) -> Iterator[Sentence]:
    """Every sentence of a document's paragraphs, list items and table cells, white space collapsed."""
    for line, paragraph in _paragraphs(COMMENT.sub(_blank, document)):
        start = 0
        text = " ".join(LINK.sub(r"\1", paragraph).split())
        for end in SENTENCE_END.finditer(text):
            if not ABBREVIATION.search(text[start : end.start()]):
                yield Sentence(line, text[start : end.start()])
                start = end.end()
        if text[start:]:
            yield Sentence(line, text[start:])


def _paragraphs(document: str) -> Iterator[tuple[int, str]]:
    """Blocks of running text with the number of their first line."""
    first, gathered, fence = 0, list[str](), ""
    for number, line in enumerate([*document.splitlines(), ""], 1):
        marker = line.strip()[:3]
        if marker in {"```", "~~~"}:
            fence = "" if fence == marker else fence or marker
        cells = line.strip().startswith("|")
        breaks = bool(fence) or not line.strip() or line.startswith("#") or cells or marker in {"```", "~~~"}
        if gathered and (breaks or LIST_ITEM.match(line)):
            yield first, "\n".join(gathered)
            gathered = []
        if cells and not fence:
            yield from ((number, cell) for cell in line.strip().strip("|").split("|") if WORD.search(cell))
        elif not breaks:
            first = first if gathered else number
            gathered.append(LIST_ITEM.sub("", line.lstrip(">")))


def _blank(found: re.Match[str]) -> str:
    return "\n" * found[0].count("\n")
