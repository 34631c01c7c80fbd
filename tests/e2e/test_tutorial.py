"""The tutorial's commands run as they stand, in order, and print what the page shows.

The demo model is served in place of the one that is fetched, under its name; the port and the name of the folder of the
files are the only other differences.
"""

import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.helm import old_helm

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```(bash|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
END = "the-block-has-ended"
HELM = f"""#!{sys.executable}
import sys
from tests.helpers.helm import render
values = {{}}
for pair in sys.argv[sys.argv.index("--set") + 1].split(","):
    place, _, value = pair.partition("=")
    *path, last = place.split(".")
    node = values
    for key in path:
        node = node.setdefault(key, {{}})
    node[last] = value
assert sys.argv[1:4] == ["template", "tandem", "helm/tandem"]
print(render(values, name="tandem").as_yaml())
"""


@dataclass(frozen=True)
class Step:
    """Commands, and the lines that their output must have in this order."""

    commands: str
    expected: tuple[str, ...]


def steps_of(page: str) -> list[Step]:
    """A block of text belongs to the block of commands before it."""
    steps = []
    for kind, body in BLOCK.findall(page):
        if kind == "bash":
            steps.append(Step(body, ()))
        else:
            steps.append(Step(steps.pop().commands, tuple(body.splitlines())))
    return steps


def missing_lines(expected: tuple[str, ...], output: str) -> list[str]:
    """Expected lines that no line of the output matches after the match of the one before; `…` matches anything."""
    lines = iter(output.splitlines())
    return [
        shown
        for shown in expected
        if not any(re.fullmatch(".*".join(map(re.escape, shown.split("…"))), line.rstrip()) for line in lines)
    ]


class Shell:
    """One bash, as the second terminal of the page."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            ["bash"],
            cwd=folder,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def run(self, commands: str) -> str:
        """Everything that they print."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{commands}\necho; echo {END}\n")
        self._process.stdin.flush()
        lines: list[str] = []
        for line in self._process.stdout:
            if line == f"{END}\n":
                return "".join(lines)
            lines.append(line)
        raise AssertionError("the shell ended:\n" + "".join(lines))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The checkout's documents and chart, an empty `build/tutorial`, and a `helm`: a stand-in where there is none."""
    for name in ("docs", "helm", "demo"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "build" / "tutorial").mkdir(parents=True)
    helm = tmp_path / "bin" / "helm"
    helm.parent.mkdir()
    if program := old_helm():
        helm.symlink_to(Path(program).resolve())
    else:
        helm.write_text(HELM)
        helm.chmod(helm.stat().st_mode | stat.S_IXUSR)
    return tmp_path


@pytest.fixture
def environment(folder: Path) -> dict[str, str]:
    return os.environ | {
        "PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "TANDEM_MODEL": str(ROOT / "demo" / "tandem-demo"),
        "TANDEM_SERVED_MODEL_NAME": "SmolLM2-135M-Instruct",
        "TANDEM_PORT": "0",
        "TANDEM_KV_CACHE_GIB": "0.25",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture
def first_terminal(folder: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """The first block's process, interrupted at the end as a user does."""
    process = subprocess.Popen(
        ["bash", "-c", f"exec {steps_of(TUTORIAL.read_text())[0].commands}"],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    yield process
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=60)
    finally:
        process.kill()


def until_served(terminal: subprocess.Popen[str], expected: tuple[str, ...]) -> str:
    """Reads until the first line that the page shows; the address in it."""
    assert terminal.stdout is not None
    text, _, address = expected[0].partition("http://")
    said: list[str] = []
    for line in terminal.stdout:
        said.append(line)
        if found := re.match(rf"{re.escape(text)}(http://\S+)", line):
            return found[1]
    raise AssertionError(f"it ended before it served at {address}:\n{''.join(said)}")


@pytest.mark.timeout(300)
def test_the_tutorial_prints_what_it_shows(
    folder: Path, environment: dict[str, str], first_terminal: subprocess.Popen[str]
) -> None:
    steps = steps_of(TUTORIAL.read_text())
    url = until_served(first_terminal, steps[0].expected)
    shell = Shell(folder, environment | {"TANDEM_URL": url, "TANDEM_LOAD_URL": url})
    try:
        for step in steps[1:]:
            output = shell.run(step.commands.replace("http://127.0.0.1:8000", url))
            assert step.expected, f"the page shows nothing of:\n{step.commands}"
            assert not missing_lines(step.expected, output), f"{step.commands}\n{output}"
    finally:
        shell.close()


def test_shown_lines_are_found_in_order() -> None:
    assert missing_lines(("a…", "c"), "b\na1\nb\nc\n") == []
    assert missing_lines(("c", "a…"), "b\na1\nb\nc\n") == ["a…"]
    assert missing_lines(("a.c",), "abc\n") == ["a.c"]


def test_a_block_of_text_belongs_to_the_commands_before_it() -> None:
    page = "```sh\nnot run\n```\n```bash\na\n```\ntext\n```text\nx\ny\n```\n```bash\nb\n```\n"
    assert steps_of(page) == [Step("a\n", ("x", "y")), Step("b\n", ())]
