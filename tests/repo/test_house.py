"""House rules that no linter knows: modules say what they own, verbs in documents exist, files keep one noun."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_LINES = 400
# NOTE: each is an edge where anything may come from someone else's code, and says so beside it.
BROAD_EXCEPTS = {
    "tandem/accounts/accounts.py",
    "tandem/engine/async_engine.py",
    "tandem/gateway/answer.py",
    "tandem/gateway/edge.py",
    "tandem/ranks/host_kv.py",
    "tandem/ranks/messages.py",
    "tandem/rpc/server.py",
    "tandem/rpc/shared_service.py",
    "tandem/simulation/engine.py",
    "tandem/simulation/fibers.py",
    "tandem/simulation/loop.py",
    "tandem/simulation/wire.py",
    "tandem/text/tokenizer.py",
    "tandem/worker/service.py",
    "tandem/worker/sources.py",
}


def tracked(pattern: str) -> list[Path]:
    found = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / line for line in found.stdout.splitlines() if (ROOT / line).exists()]


@pytest.fixture(scope="module")
def modules() -> dict[str, str]:
    """Everything but the tests, by path."""
    found = {str(path.relative_to(ROOT)): path.read_text() for path in tracked("*.py")}
    assert len(found) > 100
    return {name: source for name, source in found.items() if not name.startswith("tests/")}


def test_every_module_says_what_it_owns(modules: dict[str, str]) -> None:
    silent = [name for name, source in modules.items() if source.strip() and not ast.get_docstring(ast.parse(source))]
    assert not silent


def test_no_file_has_grown_a_second_noun(modules: dict[str, str]) -> None:
    assert not [name for name, source in modules.items() if source.count("\n") > MAX_LINES]


def test_broad_excepts_are_at_known_edges(modules: dict[str, str]) -> None:
    product = {name: source for name, source in modules.items() if name.startswith(("tandem/", "services/"))}
    broad = re.compile(r"except \(?(Base)?Exception\b|except:")
    assert {name for name, source in product.items() if broad.search(source)} == BROAD_EXCEPTS


def test_verbs_in_documents_exist() -> None:
    verbs = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for path in [ROOT / ".ci" / "run", *ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        named = re.findall(r"(?:^|`)\s*make ((?:[a-z0-9-]+ ?)+)", path.read_text(), flags=re.MULTILINE)
        assert {verb for line in named for verb in line.split()} <= verbs, path.name


def test_no_path_of_one_machine_is_committed() -> None:
    for path in tracked("*"):
        if path.suffix != ".safetensors":
            assert not re.search(r"(^|[\s\"'(])/(work|root|home)/", path.read_text(errors="replace")), path
