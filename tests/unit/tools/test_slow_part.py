"""The part of the slow tests that a commit is given: stable, small, another for other commits, and told."""

from pathlib import Path

import pytest

from tools import slow_part

ROOT = Path(__file__).parents[3]
COMMITS = [f"{number:040x}" for number in range(100)]
IDS = [f"tests/a/test_a.py::test_it[{number}]" for number in range(50)]
SLOW_TESTS = """
import pytest

@pytest.mark.slow
@pytest.mark.parametrize("number", range(40))
def test_slow(number):
    assert number >= 0

def test_quick():
    raise AssertionError("it is not slow")
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text(SLOW_TESTS)
    return tmp_path


def test_every_room_has_its_turn_and_slow_tests() -> None:
    assert {slow_part.room_of(commit) for commit in COMMITS} == set(slow_part.ROOMS)
    for room in slow_part.ROOMS:
        path = ROOT / room
        files = [path] if path.is_file() else [*path.rglob("test_*.py")]
        files = [file for file in files if path.is_file() or str(file.relative_to(ROOT)) not in slow_part.ROOMS]
        assert any("mark.slow" in file.read_text() for file in files), room


def test_rooms_of_long_tests_have_those_with_timeouts_and_no_room_has_those_of_another(tmp_path: Path) -> None:
    """Regression: skew and simulation had no turn, since all their slow tests have timeouts of their own."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    for name in ("skew/test_long", "e2e/test_long", "e2e/test_same_tokens", "e2e/test_short"):
        path = tmp_path / "tests" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        own = "@pytest.mark.timeout(600)\n" if name.endswith("long") else ""
        path.write_text(f"import pytest\n\n{own}@pytest.mark.slow\ndef test_it():\n    pass\n")
    assert slow_part.collected("tests/skew", tmp_path) == ["tests/skew/test_long.py::test_it"]
    assert slow_part.collected("tests/e2e", tmp_path) == ["tests/e2e/test_short.py::test_it"]


def test_a_commit_has_one_part_and_others_have_others() -> None:
    parts = {commit: slow_part.chosen(commit, IDS) for commit in COMMITS}
    for commit, part in parts.items():
        assert len(part) == slow_part.NUM_TESTS
        assert part == sorted(part, key=IDS.index) == slow_part.chosen(commit, IDS)
        assert set(slow_part.chosen(commit, IDS[::-1])) == set(part)
    assert {node_id for part in parts.values() for node_id in part} == set(IDS)
    assert slow_part.chosen(COMMITS[0], IDS[:3]) == IDS[:3]


def test_slow_tests_alone_are_run_and_the_command_that_repeats_them_is_told(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert slow_part.run(COMMITS[1], ["tests"], project) == 0
    told = capfd.readouterr().out
    assert f"12 of 40 slow tests of tests; again: make test-part COMMIT={COMMITS[1]}" in told
    assert "12 passed" in told


def test_a_failure_is_the_exit_code(project: Path) -> None:
    (project / "tests" / "test_some.py").write_text(SLOW_TESTS.replace(">= 0", "< 0"))
    assert slow_part.run(COMMITS[1], ["tests"], project, ["-q"]) == 1


def test_a_room_that_cannot_be_collected_is_no_success(project: Path) -> None:
    (project / "tests" / "test_some.py").write_text("import nothing_of_this_name")
    with pytest.raises(SystemExit, match="tests: its slow tests cannot be collected"):
        slow_part.run(COMMITS[1], ["tests"], project)
    (project / "tests" / "test_some.py").write_text("")
    with pytest.raises(SystemExit, match="or there are none"):
        slow_part.run(COMMITS[1], ["tests"], project)


def test_ci_runs_it() -> None:
    assert "make test-part" in (ROOT / ".ci" / "run").read_text().splitlines()
