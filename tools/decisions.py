"""Numbers the decision pages and writes their index: `python -m tools.decisions`.

A page is written as `docs/decisions/YYYY-MM-DD-title.md`, so that branches never take the same number. This renames
such pages to the next free `NNNN-title.md`, follows the links to them, and lists all in `docs/decisions/README.md`.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DATED = re.compile(r"(\d{4}-\d{2}-\d{2})-([^\s()/]+?\.md)")
NUMBERED = re.compile(r"(\d{4})-(?!\d{2}-\d{2}-)(.+\.md)")
HEAD = """# Decisions

One page for each decision: context, decision, figures, and what did not help. Figures name their hardware. Pages are
records of their day, and later ones may replace what they say. [Architecture](../architecture.md) is today's state.

A new page is named by its date, `YYYY-MM-DD-title.md`. `python -m tools.decisions` numbers it and writes this list.

| page | date |
|---|---|
"""


def numbered(directory: Path) -> dict[str, Path]:
    """Pages by number, in order. Raises ValueError where two pages have one number."""
    pages: dict[str, Path] = {}
    for path in sorted(directory.glob("*.md")):
        if found := NUMBERED.fullmatch(path.name):
            if found[1] in pages:
                raise ValueError(
                    f"{pages[found[1]].name} and {path.name} have one number: rename the newer one to its date"
                )
            pages[found[1]] = path
    return pages


def number_dated(directory: Path, documents: list[Path]) -> dict[str, str]:
    """Renames pages that are named by date, oldest first, and links to them in `documents`; new names by old ones."""
    number = int(max(numbered(directory), default="0"))
    renamed = {}
    for path in sorted(directory.glob("*.md")):
        if found := DATED.fullmatch(path.name):
            number += 1
            renamed[path.name] = f"{number:04d}-{found[2]}"
            text = path.read_text()
            if not re.search(r"^\d{4}-\d{2}-\d{2}$", text, re.MULTILINE):
                title, _, rest = text.partition("\n")
                path.write_text(f"{title}\n\n{found[1]}\n{rest}")
            path.rename(directory / renamed[path.name])
    for document in [*documents, *directory.glob("*.md")]:
        text = document.read_text()
        changed = re.sub(DATED, lambda found: renamed.get(found[0], found[0]), text)
        if changed != text:
            document.write_text(changed)
    return renamed


def index(directory: Path) -> str:
    """The text of the index: every numbered page with its title and date."""
    rows = []
    for number, path in numbered(directory).items():
        text = path.read_text()
        title = text.partition("\n")[0].removeprefix("# ")
        date = re.search(r"^\d{4}-\d{2}-\d{2}$", text, re.MULTILINE)
        rows.append(f"| {number} [{title}]({path.name}) | {date[0] if date else ''} |\n")
    return HEAD + "".join(rows)


def main() -> int:
    directory = ROOT / "docs" / "decisions"
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "helm").rglob("*.md")]
    for old, new in number_dated(directory, documents).items():
        print(f"{old} -> {new}")
    (directory / "README.md").write_text(index(directory))
    return 0


if __name__ == "__main__":
    sys.exit(main())
