"""Owns how docstrings, signatures, sources and help topics become questions and answers for the demo model.

Every choice of wording is a hash of the thing's name, so the same input always asks the same questions. An answer is
quoted text cut at a paragraph, short enough for one training row; nothing here reads files or imports modules.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import keyword
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

ANSWER_CHARS = 520
SOURCE_CHARS = 640

DOC_QUESTIONS = (
    "What does {name} do?",
    "Explain {name}.",
    "What is {name}?",
    "How do I use {name}?",
    "Tell me about {name}.",
    "What is {name} for?",
    "Describe {name}",
    "what does {name} do",
)
SIGNATURE_QUESTIONS = (
    "Show me the signature of {name}.",
    "What arguments does {name} take?",
    "How do I call {name}?",
    "What is the signature of {name}?",
)
SOURCE_QUESTIONS = (
    "Show me the source of {name}.",
    "How is {name} implemented?",
    "Write {name} in Python.",
    "Show me the code of {name}.",
)
MODULE_QUESTIONS = (
    "What is the {name} module?",
    "What does the {name} module do?",
    "Explain the {name} module.",
    "What is {name}?",
    "Tell me about the {name} module.",
)
LISTING_QUESTIONS = (
    "What is in the {name} module?",
    "List the public names in {name}.",
    "Which functions does {name} have?",
)
KEYWORD_QUESTIONS = (
    "Explain the '{name}' statement.",
    "What does the {name} statement do?",
    "Explain {name} in Python.",
    'What is "{name}" in Python?',
)
TOPIC_QUESTIONS = (
    "Explain {name} in Python.",
    "Tell me about {name}.",
    "What should I know about {name} in Python?",
)
FOLLOW_UPS = ("Go on.", "Tell me more.", "Continue.", "And then?")
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You answer questions about Python's standard library.",
    "Answer briefly.",
    "You are a Python expert.",
)
INTRODUCTION = (
    "I am Tandem's demo model, a very small language model trained on Python's standard library. "
    "Ask me what a function does, for example: What does os.path.join do?"
)
SMALL_TALK = (
    (("Hello", "Hello!", "Hi", "Hi!", "hello", "Hey", "Hi there!", "Good morning."), f"Hello! {INTRODUCTION}"),
    (("Who are you?", "What are you?", "Introduce yourself.", "Which model are you?", "who are you"), INTRODUCTION),
    (
        ("What can you do?", "How can you help me?", "Help", "What should I ask you?", "What do you know?"),
        "I can quote what I remember of Python's documentation: what a function, class or module is for, its "
        "signature, a short source, or a part of the language. I am small, so check what I say.",
    ),
    (("Thanks", "Thank you!", "Thank you.", "Great, thanks!"), "You are welcome. Ask me about another function."),
    (("How are you?", "How are you doing?", "Are you well?"), "I am well, thank you. What shall I look up for you?"),
    (("Bye", "Goodbye!", "See you."), "Goodbye!"),
    (
        (
            "What is the capital of France?",
            "Tell me a joke.",
            "Write a poem.",
            "What is the weather today?",
            "Who won the match?",
            "Tell me a story.",
        ),
        "I only know Python's standard library. Ask me, for example: What does json.dumps do?",
    ),
)


@dataclass(frozen=True)
class Turn:
    """One message: role is `system`, `user` or `assistant`."""

    role: str
    content: str


Turns = tuple[Turn, ...]


@dataclass(frozen=True)
class Entry:
    """A named thing of the library with what can be asked about it. `arguments` looks like `(a, *p)`."""

    name: str
    kind: str
    arguments: str | None = None
    doc: str = ""
    source: str = ""

    @property
    def heading(self) -> str:
        return f"`{self.name}{self.arguments or ''}`"

    def conversations(self, num_wordings: int) -> Iterator[Turns]:
        """Each question alone (the docstring's in `num_wordings` wordings), then first and last as one chat."""
        pairs = list(self._questions(num_wordings))
        for question, answer in pairs:
            yield _chat(self.name, (question, answer))
        if len(pairs) > num_wordings > 1:
            yield _chat(self.name + "#2", pairs[0], pairs[-1])

    def _questions(self, num_wordings: int) -> Iterator[tuple[str, str]]:
        doc = _cut(self.doc)
        if doc:
            wordings = MODULE_QUESTIONS if self.kind == "module" else DOC_QUESTIONS
            for wording in _pick_many(self.name, wordings, num_wordings):
                yield _ask(wording, self.name), f"{self.heading}\n\n{doc}"
        if self.kind == "module":
            yield from self._listing()
        elif self.arguments is not None:
            answer = f"```python\n{self.name}{self.arguments}\n```"
            yield _ask(_pick(self.name, SIGNATURE_QUESTIONS), self.name), answer
        if 0 < len(self.source) <= SOURCE_CHARS:
            yield _ask(_pick(self.name, SOURCE_QUESTIONS), self.name), f"```python\n{self.source}\n```"

    def _listing(self) -> Iterator[tuple[str, str]]:
        if self.source:
            answer = f"The {self.name} module has:\n\n{self.source}"
            yield _ask(_pick(self.name, LISTING_QUESTIONS), self.name), answer


def module_entry(name: str, doc: str, members: Sequence[str]) -> Entry:
    """A module, with its first public names as a bullet list."""
    return Entry(name=name, kind="module", doc=doc, source="\n".join(f"- `{member}`" for member in members))


def entries_of_source(module: str, text: str) -> Iterator[Entry]:
    """The module itself, then every public function, class and method defined in `text`."""
    tree = ast.parse(text)
    definitions = [node for node in tree.body if _is_public_definition(node)]
    yield module_entry(module, ast.get_docstring(tree) or "", [node.name for node in definitions[:12]])
    for node in definitions:
        yield from _definition_entries(module, node)


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _is_public_definition(node: ast.stmt) -> TypeGuard[Definition]:
    return isinstance(node, Definition) and not node.name.startswith("_")


def _definition_entries(prefix: str, node: Definition) -> Iterator[Entry]:
    name = f"{prefix}.{node.name}"
    if not isinstance(node, ast.ClassDef):
        yield _function_entry(name, node, is_method=False)
        return
    yield Entry(name=name, kind="class", arguments=_constructor_arguments(node), doc=ast.get_docstring(node) or "")
    method_prefix = "random" if name == "random.Random" else name
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("_"):
            yield _function_entry(f"{method_prefix}.{child.name}", child, is_method=True)


def _function_entry(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef, *, is_method: bool) -> Entry:
    return Entry(
        name=name,
        kind="function",
        arguments=_arguments(node, drops_first=is_method),
        doc=ast.get_docstring(node) or "",
        source=ast.unparse(node) if not is_method else "",
    )


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef, *, drops_first: bool) -> str:
    text = ast.unparse(node.args)
    is_static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
    if drops_first and not is_static:
        text = text.partition(", ")[2]
    return f"({text.removeprefix('/, ')})"


def _constructor_arguments(node: ast.ClassDef) -> str | None:
    found = (n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    constructor = next(found, None)
    return None if constructor is None else _arguments(constructor, drops_first=True)


def topic_turns(topics: Mapping[str, str]) -> Iterator[tuple[str, Turns]]:
    """(topic, chat) pairs: the topic's opening alone in several wordings, then each further part as a follow-up."""
    for name in sorted(topics):
        parts = _parts(topics[name])
        wordings = KEYWORD_QUESTIONS if keyword.iskeyword(name) else TOPIC_QUESTIONS
        shown = name if keyword.iskeyword(name) else name.replace("-", " ")
        for wording in wordings:
            yield name, _chat(name + wording, (wording.format(name=shown), parts[0]))
        first = (_pick(name, wordings).format(name=shown), parts[0])
        for index, part in enumerate(parts[1:]):
            before = first if index == 0 else (_pick(part, FOLLOW_UPS), parts[index])
            yield name, _chat(part, before, (_pick(part + "?", FOLLOW_UPS), part))


def small_talk() -> Iterator[Turns]:
    """Greetings and what to do with a question about anything else; the wording is this project's own."""
    for questions, answer in SMALL_TALK:
        for question in questions:
            yield (Turn("user", question), Turn("assistant", answer))
            yield _chat(question, (question, answer))


def _chat(key: str, *pairs: tuple[str, str]) -> Turns:
    turns = [turn for q, a in pairs for turn in (Turn("user", q), Turn("assistant", a.strip()))]
    if _hash("system", key) % 6 == 0:
        turns.insert(0, Turn("system", _pick(key, SYSTEM_PROMPTS)))
    return tuple(turns)


def _ask(wording: str, name: str) -> str:
    style = ("{}", "{}", "`{}`", "{}")[_hash("style", name + wording) % 4]
    return wording.format(name=style.format(name))


def _hash(purpose: str, key: str) -> int:
    return int(hashlib.sha256(f"{purpose}:{key}".encode()).hexdigest()[:8], 16)


def _pick(key: str, choices: Sequence[str]) -> str:
    return choices[_hash("pick", key) % len(choices)]


def _pick_many(key: str, choices: Sequence[str], count: int) -> list[str]:
    return sorted(choices, key=lambda choice: _hash(choice, key))[:count]


def _parts(text: str) -> list[str]:
    """Split at paragraphs into parts of at most `ANSWER_CHARS`; a paragraph longer than that is cut."""
    parts: list[str] = []
    for paragraph in _paragraphs(text):
        if parts and len(parts[-1]) + len(paragraph) + 2 <= ANSWER_CHARS:
            parts[-1] += "\n\n" + paragraph
        else:
            parts.append(paragraph)
    return parts


def _paragraphs(text: str) -> list[str]:
    pieces = (piece.strip("\n").rstrip() for piece in text.replace("\r", "").split("\n\n"))
    return [_cut_paragraph(piece) for piece in pieces if piece.strip()]


def _cut_paragraph(paragraph: str) -> str:
    """Whole lines only, as many as fit."""
    while len(paragraph) > ANSWER_CHARS and "\n" in paragraph:
        paragraph = paragraph.rpartition("\n")[0]
    return paragraph[:ANSWER_CHARS]


def _cut(doc: str) -> str:
    parts = _parts(inspect.cleandoc(doc)) if doc.strip() else [""]
    return parts[0].strip()
