"""Owns the demo model's training text, mined from the running Python's own standard library (PSF licence).

The corpus is a pure function of the installed Python: sources are parsed, never imported, and only the C builtins in
`BUILTIN_MODULES` are asked for their docstrings. Held-out text is chosen by hashing a whole source file's name, so
that a docstring is never in training as text and in evaluation as an answer. Nothing is ever downloaded.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data import topics

from tools.demo_questions import Entry, Turn, entries_of_source, module_entry, small_talk, topic_turns

HELD_OUT_PER_THOUSAND = 20
BUILTIN_MODULES = ("builtins", "math", "itertools", "time", "operator")
FAVOURITE_MODULES = frozenset(
    (
        "argparse",
        "ast",
        "base64",
        "bisect",
        "builtins",
        "collections",
        "contextlib",
        "copy",
        "csv",
        "dataclasses",
        "datetime",
        "decimal",
        "difflib",
        "enum",
        "fnmatch",
        "fractions",
        "functools",
        "glob",
        "heapq",
        "itertools",
        "json",
        "logging",
        "math",
        "operator",
        "os",
        "os.path",
        "pathlib",
        "pprint",
        "queue",
        "random",
        "re",
        "shlex",
        "shutil",
        "statistics",
        "string",
        "subprocess",
        "tempfile",
        "textwrap",
        "threading",
        "time",
        "typing",
        "urllib.parse",
    )
)
FAVOURITE_COPIES = 3
FAVOURITE_WORDINGS = 4
SKIPPED_PACKAGES = frozenset(
    (
        "__phello__",
        "distutils",
        "encodings",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "lib-dynload",
        "msilib",
        "pydoc_data",
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "tkinter",
        "turtledemo",
        "__pycache__",
    )
)
SKIPPED_FILES = ("_sysconfigdata", "_osx_support", "turtle.py", "this.py", "sre_", "nturl2path", "ntpath", "pydoc.py")
MODULE_ALIASES = {
    "posixpath": "os.path",
    "genericpath": "os.path",
    "_pydecimal": "decimal",
    "_pydatetime": "datetime",
    "_pyio": "io",
    "_strptime": "time",
    "_weakrefset": "weakref",
    "json.decoder": "json",
    "json.encoder": "json",
    "concurrent.futures._base": "concurrent.futures",
    "concurrent.futures.thread": "concurrent.futures",
    "concurrent.futures.process": "concurrent.futures",
}


@dataclass(frozen=True)
class Document:
    """One standard-library source file, whole."""

    name: str
    text: str


@dataclass(frozen=True)
class Conversation:
    """One chat: turns in order, `copies` times in each epoch. `source` decides whether it is held out."""

    source: str
    turns: tuple[Turn, ...]
    copies: int = 1


@dataclass(frozen=True)
class Corpus:
    """Everything mined, in a fixed order; `train` and `held_out` share no source file."""

    documents: tuple[Document, ...]
    conversations: tuple[Conversation, ...]

    def sha256(self) -> str:
        """Fingerprint of every byte of text, for `training.json`."""
        digest = hashlib.sha256()
        items: tuple[Document | Conversation, ...] = (*self.documents, *self.conversations)
        for item in items:
            digest.update(json.dumps(asdict(item)).encode())
        return digest.hexdigest()

    def split(self) -> tuple[Corpus, Corpus]:
        """(training, held-out) parts, by source file."""
        return self._where(held_out=False), self._where(held_out=True)

    def _where(self, *, held_out: bool) -> Corpus:
        return Corpus(
            tuple(d for d in self.documents if is_held_out(d.name) == held_out),
            tuple(c for c in self.conversations if is_held_out(c.source) == held_out),
        )


def is_held_out(source: str) -> bool:
    """Whether text from `source` is kept for evaluation: about 2 % of sources, by hash of the name alone."""
    return int(hashlib.sha256(source.encode()).hexdigest()[:8], 16) % 1000 < HELD_OUT_PER_THOUSAND


def mine_corpus() -> Corpus:
    """Read the running Python's standard library into a corpus; the same Python gives the same corpus."""
    documents = tuple(_documents(Path(sysconfig.get_paths()["stdlib"])))
    conversations = [c for document in documents for c in _source_conversations(document)]
    conversations += [c for name in BUILTIN_MODULES for c in _builtin_conversations(name)]
    conversations += [Conversation(f"topic:{k}", t, 2) for k, t in topic_turns(topics.topics)]
    conversations += [Conversation("small-talk", turns, 6) for turns in small_talk()]
    return Corpus(documents, tuple(conversations))


def corpus_origin() -> str:
    """Version of the Python that the corpus came from, for the model card."""
    return f"CPython {platform.python_version()} standard library"


def _documents(stdlib: Path) -> Iterator[Document]:
    for path in sorted(stdlib.rglob("*.py")):
        relative = path.relative_to(stdlib)
        if SKIPPED_PACKAGES.isdisjoint(relative.parts[:-1]) and not _is_skipped_file(relative):
            yield Document(relative.as_posix(), path.read_text(encoding="utf-8", errors="replace"))


def _is_skipped_file(relative: Path) -> bool:
    return relative.name.startswith(SKIPPED_FILES) or any(p.startswith("config-") for p in relative.parts)


def public_module_name(file_name: str) -> str | None:
    """`json/decoder.py` → `json`, as a user would import it; None for a private module."""
    dotted = file_name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    if dotted in MODULE_ALIASES:
        return MODULE_ALIASES[dotted]
    if dotted.startswith("asyncio."):
        return "asyncio"
    return None if any(part.startswith("_") for part in dotted.split(".")) else dotted


def _source_conversations(document: Document) -> Iterator[Conversation]:
    module = public_module_name(document.name)
    if module is None:
        return
    is_favourite = module in FAVOURITE_MODULES
    for entry in entries_of_source(module, document.text):
        for turns in entry.conversations(FAVOURITE_WORDINGS if is_favourite else 1):
            yield Conversation(document.name, turns, FAVOURITE_COPIES if is_favourite else 1)


def _builtin_conversations(module_name: str) -> Iterator[Conversation]:
    for entry in _builtin_entries(module_name):
        for turns in entry.conversations(FAVOURITE_WORDINGS):
            yield Conversation(f"builtin:{entry.name}", turns, FAVOURITE_COPIES)


def _builtin_entries(module_name: str) -> Iterator[Entry]:
    module = importlib.import_module(module_name)
    prefix = "" if module_name == "builtins" else f"{module_name}."
    names = [name for name in sorted(vars(module)) if not name.startswith("_")]
    yield module_entry(module_name, inspect.getdoc(module) or "", names[:12])
    for name in names:
        thing = getattr(module, name)
        if not callable(thing):
            continue
        yield _documented(f"{prefix}{name}", thing)
        is_plain_type = isinstance(thing, type) and not issubclass(thing, BaseException)
        for method in sorted(vars(thing)) if is_plain_type else ():
            if not method.startswith("_") and callable(getattr(thing, method)):
                yield _documented(f"{prefix}{name}.{method}", getattr(thing, method))


def _documented(name: str, thing: object) -> Entry:
    signature = getattr(thing, "__text_signature__", None) or ""
    arguments = signature.replace("$self, ", "").replace("$self", "").replace("$module, ", "").replace("$module", "")
    return Entry(name=name, kind="function", arguments=arguments or None, doc=inspect.getdoc(thing) or "")
