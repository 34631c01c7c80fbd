"""Rules that keep one idea in one place, which the import rules cannot say."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.architecture.registry import ARCHITECTURES

ROOT = Path(__file__).parents[2]
MAX_FAMILY_LINES = 80

# They ask a `StateSpec`, whatever kind of state it is of.
ASKING = (
    *("core", "kvcache", "scheduler", "engine", "worker", "transport", "locality", "routing", "planning", "rpc"),
    *("ranks", "router", "process", "planner_service", "cli", "telemetry"),
    *("compute/arena.py", "compute/ranked_pages.py", "compute/shared_pages.py"),
)

# Words of kinds of layers and of families, which neither block manager nor scheduler says.
KINDS = {"attention", "latent", "latents", "recurrent", "mamba", "conv", "moe", "expert", "experts", "sinks", "window"}
FAMILIES = {re.split(r"[\d_]", entry.module)[0] for entry in ARCHITECTURES.values()}

# Modules that look into a scope: its definition, the root hash, the wire, the tenant's name, what an engine can apply.
SCOPE_READERS = {
    "tandem/core/scope.py",
    "tandem/core/hashing.py",
    "tandem/gateway/accounts.py",
    "tandem/engine/validation.py",
}

# Names that only `compute` says: formats of weights, and orders of their elements.
FORMAT_NAMES = {"MatrixWeight", "DenseFormat", "PackedDense", "Order", "STRIPS"}
# What others take of the weights' room: the seam of any format, and the table that chooses.
WEIGHT_SEAM = {
    f"tandem.compute.weights.{module}" for module in ("base", "by_head", "formats", "shards", "row_rounding")
}  # of any format


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


def says_a_kind(source: str) -> list[str]:
    """Names with the word of a kind of layer or of a family."""
    names = {
        value
        for node in nodes(source)
        for _, value in ast.iter_fields(node)
        if isinstance(value, str) and value.isidentifier()
    }
    return sorted(name for name in names if {*re.split(r"[\d_]", name.lower())} & (KINDS | FAMILIES))


def looks_into_a_scope(source: str) -> list[int]:
    return [
        node.lineno for node in nodes(source) if isinstance(node, ast.Attribute) and node.attr in ("salt", "adapter")
    ]


def names_a_format(source: str) -> list[int]:
    """Lines that name a format of weights, or import one."""
    return [
        node.lineno
        for node in nodes(source)
        if (isinstance(node, ast.Name) and node.id in FORMAT_NAMES)
        or (isinstance(node, ast.Attribute) and node.attr in FORMAT_NAMES)
        or (isinstance(node, ast.ImportFrom) and _imports_a_format(node))
    ]


def _imports_a_format(node: ast.ImportFrom) -> bool:
    module = node.module or ""
    is_inside = module.startswith("tandem.compute.weights") and module not in WEIGHT_SEAM
    return is_inside or any(alias.name in FORMAT_NAMES for alias in node.names)


@pytest.mark.parametrize(
    "source",
    [
        "isinstance(weight, MatrixWeight)",
        "matrix.order is base.Order",
        "from tandem.compute.order import Order",
        "from tandem.compute.weights.int4 import Anything",
        "from tandem.compute.weights import dense",
    ],
)
def test_the_rule_finds_formats(source: str) -> None:
    assert names_a_format(source) == [1]


def test_only_compute_names_formats_of_weights() -> None:
    """And the quantiser, which reads one format to write another."""
    allowed = {ROOT / "tandem" / "compute", ROOT / "tandem" / "quantize"}
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / "tandem").rglob("*.py"))
        if "v1" not in path.parts and allowed.isdisjoint(path.parents)
        for line in names_a_format(path.read_text())
    ]
    assert not found, f"call the Weight instead: {found}"


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
        for place in ASKING
        for path in sorted((ROOT / "tandem").glob(place if place.endswith(".py") else f"{place}/**/*.py"))
        if "v1" not in path.parts
        for line in looks_at_a_kind(path.read_text())
    ]
    assert not found, f"ask the StateSpec instead: {found}"


@pytest.mark.parametrize("source", ["self.num_experts = 1", "def latent_blocks(): ...", "kind == 'mamba2'"])
def test_the_rule_finds_names_of_kinds(source: str) -> None:
    assert len(says_a_kind(source)) == 1


def test_block_manager_and_scheduler_say_no_kind_and_no_family() -> None:
    rooms = (ROOT / "tandem" / "kvcache", ROOT / "tandem" / "scheduler")
    found = {path.name: says_a_kind(path.read_text()) for room in rooms for path in room.rglob("*.py")}
    assert {name: words for name, words in found.items() if words} == {}


def test_a_scope_is_passed_on_whole() -> None:
    readers = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tandem").rglob("*.py")
        if "v1" not in path.parts and looks_into_a_scope(path.read_text())
    }
    assert readers == SCOPE_READERS


def test_a_family_is_one_short_file() -> None:
    """Code that does not fit goes into a helper named for what it describes, or into `base`."""
    families = ROOT / "tandem" / "architecture" / "families"
    lines = {
        module: (families / f"{module}.py").read_text().count("\n")
        for module in {entry.module for entry in ARCHITECTURES.values()}
    }
    assert not {module: count for module, count in lines.items() if count > MAX_FAMILY_LINES}
