"""Rules that keep one idea in one place, which the import rules cannot say."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# They ask a `StateSpec`, whatever kind of state it is of.
ASKING = ("core", "kvcache", "scheduler", "engine", "worker", "transport", "locality", "routing", "planning", "rpc")

# Modules that look into a scope: its definition, the root hash, the wire, the tenant's name, what an engine can apply.
SCOPE_READERS = {
    "tandem/core/scope.py",
    "tandem/core/hashing.py",
    "tandem/rpc/codec_common.py",
    "tandem/gateway/accounts.py",
    "tandem/engine/validation.py",
}


def nodes(source: str) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(source))


def looks_at_a_kind(source: str) -> list[int]:
    """Lines that ask of what kind a layer's state is, or how far it reaches."""
    return [
        node.lineno
        for node in nodes(source)
        if (isinstance(node, ast.Attribute) and node.attr == "window")
        or (isinstance(node, ast.ImportFrom) and any(_is_kind(name.name) for name in node.names))
        or (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("isinstance", "type")
            and any(_is_kind(name.split(".")[-1]) for name in map(ast.unparse, node.args))
        )
    ]


def _is_kind(name: str) -> bool:
    return name.endswith(("KVSpec", "AttentionSpec", "MixerSpec")) or name == "spec"


def looks_into_a_scope(source: str) -> list[int]:
    return [
        node.lineno for node in nodes(source) if isinstance(node, ast.Attribute) and node.attr in ("salt", "adapter")
    ]


@pytest.mark.parametrize(
    "source",
    [
        "spec.window",
        "isinstance(spec, LatentSpec)",
        "isinstance(group.spec, Any)",
        "type(group.spec)",
        "from tandem.architecture.state import KVSpec",
    ],
)
def test_the_rule_finds_what_it_forbids(source: str) -> None:
    assert looks_at_a_kind(source) == [1]


def test_only_architecture_and_attention_know_kinds_of_state() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for room in ASKING
        for path in sorted((ROOT / "tandem" / room).rglob("*.py"))
        if "v1" not in path.parts
        for line in looks_at_a_kind(path.read_text())
    ]
    assert not found, f"ask the StateSpec instead: {found}"


def test_a_scope_is_passed_on_whole() -> None:
    readers = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tandem").rglob("*.py")
        if "v1" not in path.parts and looks_into_a_scope(path.read_text())
    }
    assert readers == SCOPE_READERS
