"""The rules, as functions of text: each yields the findings of one module, document or commit."""

import ast
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tools.prose.markdown import sentences_of

MAX_SUBJECT = 72  # characters
MAX_SENTENCE = 40  # words
DOCSTRING = re.compile(r'(?:#[^\n]*\n|\s)*[rRuU]?(?:"""|\'\'\'|")\s*([^\n]*)')
CLAUSE = re.compile(r"(?:who|what|how|which|whom|whose|where|when|why)(?:ever)?\b", re.IGNORECASE)
QUOTED_CLAUSE = re.compile(rf"[\"'][\s\\]*{CLAUSE.pattern}", re.IGNORECASE)


@dataclass(frozen=True)
class Finding:
    """A place that breaks a rule, with the text and the remedy."""

    rule: str
    place: str
    text: str
    remedy: str

    @property
    def key(self) -> str:
        """The name in the list of known findings: independent of the place, so that moving a text is no new finding."""
        digest = hashlib.sha256(self.text.encode()).hexdigest()[:12]
        return f"{self.rule} {digest} {' '.join(self.text.split()[:8])}"

    def __str__(self) -> str:
        return f"{self.place}: {self.rule}: {self.remedy}\n    {self.text}"


def first_line(path: str, source: str) -> Iterator[Finding]:
    """A module's first line names or states; it is no clause that begins with a question word."""
    found = DOCSTRING.match(source)
    if found and CLAUSE.match(found[1]):
        text = found[1].removesuffix('"""').strip()
        yield Finding("first line", path, text, "begin with a noun or a verb: what the module owns or does")


def definition_lines(path: str, source: str) -> Iterator[Finding]:
    """The first line of a class or function names or states, too. "Whether ..." begins that of a predicate."""
    # NOTE: to parse every file takes seconds, and few have a string that begins so
    pending: list[ast.AST] = [ast.parse(source)] if QUOTED_CLAUSE.search(source) else []
    while pending:
        node = pending.pop()
        for block in ("body", "orelse", "handlers", "finalbody"):
            pending += getattr(node, block, ())
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = (ast.get_docstring(node) or "").partition("\n")[0]
            if CLAUSE.match(text):
                remedy = "begin with a noun or a verb: what it is, does or returns"
                yield Finding("first line", f"{path}:{node.body[0].lineno}", text, remedy)


def long_sentences(path: str, document: str) -> Iterator[Finding]:
    """A sentence of a document has at most `MAX_SENTENCE` words."""
    for each in sentences_of(document):
        if each.num_words > MAX_SENTENCE:
            remedy = f"{each.num_words} words, split it into sentences of at most {MAX_SENTENCE}"
            yield Finding("sentence", f"{path}:{each.line}", each.text, remedy)


def long_subject(commit: str, subject: str) -> Iterator[Finding]:
    """A commit's subject has at most `MAX_SUBJECT` characters."""
    if len(subject) > MAX_SUBJECT:
        remedy = f"{len(subject)} characters, write at most {MAX_SUBJECT} and the reason into the body"
        yield Finding("subject", f"commit {commit}", subject, remedy)
