"""A public class name stands for one class in `tandem` and `services`, so a name read anywhere says which one it is."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATED = ROOT / "tandem" / "rpc" / "v1"


def test_public_class_names_are_unique() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(ROOT.glob("tandem/**/*.py")) + sorted(ROOT.glob("services/**/*.py")):
        if GENERATED not in path.parents:
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
