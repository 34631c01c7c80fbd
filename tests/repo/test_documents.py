"""The documents: links lead somewhere, the index of decisions is complete, architecture.md names every package."""

import re
from pathlib import Path

import pytest

from tools import decisions

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "helm").rglob("*.md")]
DECISIONS = ROOT / "docs" / "decisions"
LINK = re.compile(r"\]\(([^()\s]+)\)")


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def anchors(document: Path) -> set[str]:
    """Names of the headings as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for link in LINK.findall(without_code(document.read_text())):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link


def test_every_decision_is_in_the_index() -> None:
    dated = [path.name for path in DECISIONS.glob("*.md") if decisions.DATED.fullmatch(path.name)]
    remedy = "run `python -m tools.decisions`"
    assert not dated, f"{remedy}, which gives these pages their numbers"
    assert (DECISIONS / "README.md").read_text() == decisions.index(DECISIONS), remedy


def test_numbers_of_decisions_have_no_gap() -> None:
    numbers = [int(number) for number in decisions.numbered(DECISIONS)]
    assert numbers == list(range(1, len(numbers) + 1))


def test_every_decision_has_title_date_and_sections() -> None:
    for path in decisions.numbered(DECISIONS).values():
        assert re.match(r"# .+\n\n\d{4}-\d{2}-\d{2}\n", path.read_text()), path.name


def test_dated_pages_get_numbers_and_their_links_follow(tmp_path: Path) -> None:
    directory = tmp_path / "decisions"
    directory.mkdir()
    (directory / "0001-first.md").write_text("# First\n\n2026-11-01\n\nSee [next](2026-11-03-b.md).\n")
    (directory / "2026-11-03-b.md").write_text("# B\n\n2026-11-03\n")
    (directory / "2026-11-02-a.md").write_text("# A\n\n## Context\n")
    document = tmp_path / "README.md"
    document.write_text("[A](decisions/2026-11-02-a.md), [gone](decisions/2026-11-04-c.md)")
    renamed = decisions.number_dated(directory, [document])
    assert renamed == {"2026-11-02-a.md": "0002-a.md", "2026-11-03-b.md": "0003-b.md"}
    assert document.read_text() == "[A](decisions/0002-a.md), [gone](decisions/2026-11-04-c.md)"
    assert "(0003-b.md)" in (directory / "0001-first.md").read_text()
    assert "| 0002 [A](0002-a.md) | 2026-11-02 |" in decisions.index(directory)


def test_two_pages_of_one_number_are_refused(tmp_path: Path) -> None:
    for name in ("0001-a.md", "0001-b.md"):
        (tmp_path / name).write_text("# Page\n")
    with pytest.raises(ValueError, match=r"0001-a\.md and 0001-b\.md have one number"):
        decisions.index(tmp_path)


def test_the_architecture_names_every_package() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    packages = {path.parent.name for path in (ROOT / "tandem").glob("*/__init__.py")}
    assert not {name for name in packages if not re.search(rf"\b{name}\b", text)}


def test_the_readme_is_a_screen_and_a_half() -> None:
    """One screen has some 57 lines. Details belong into docs/."""
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 86
    assert len(text.split()) <= 700
