"""`make clients` when things go wrong: a client that cannot be installed, or that finds a fault."""

import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tools.clients.__main__ import Clients
from tools.clients.catalogue import CLIENTS
from tools.clients.checks import Checks, equal, holds
from tools.clients.environment import InstallError, digest_of, prepare
from tools.clients.report import ClientReport, save, show

SCRIPTS = Path(__file__).parents[2] / "tools" / "clients"
NOWHERE = "http://127.0.0.1:9"


def test_a_client_that_cannot_be_installed_says_why(tmp_path: Path) -> None:
    requirements = tmp_path / "requirements.txt"
    requirements.write_text(f"nothing @ file://{tmp_path}/missing.whl\n")
    with pytest.raises(InstallError, match=r"broken cannot be installed: .*missing\.whl"):
        prepare("broken", requirements, tmp_path / "environment")
    assert not (tmp_path / "environment" / ".installed").exists()


def test_an_environment_is_made_once_and_again_when_its_requirements_change(tmp_path: Path) -> None:
    requirements, directory = tmp_path / "requirements.txt", tmp_path / "environment"
    requirements.write_text("# nothing\n")
    python = prepare("empty", requirements, directory)
    (directory / "mark").touch()
    assert prepare("empty", requirements, directory) == python
    assert (directory / "mark").exists()
    requirements.write_text("# nothing else\n")
    prepare("empty", requirements, directory)
    assert not (directory / "mark").exists()


def test_a_client_that_fails_is_reported_and_the_exit_code_says_so(tmp_path: Path) -> None:
    """Nobody listens there, so its checks fail one by one; the report names each."""
    runner = Clients.model_validate({"url": NOWHERE, "only": ["open-webui"], "directory": tmp_path})
    environment = tmp_path / "sdk" / "bin"
    environment.mkdir(parents=True)
    (environment / "python").symlink_to(sys.executable)
    (tmp_path / "sdk" / ".installed").write_text(digest_of(SCRIPTS / "sdk.txt"))
    assert runner.run() == 1
    (report,) = json.loads((tmp_path / "report.json").read_text())
    assert not report["is_well"]
    assert all("refused" in check["failure"] for check in report["checks"])


def test_no_client_has_that_name(tmp_path: Path) -> None:
    assert Clients.model_validate({"url": NOWHERE, "only": ["nobody"], "directory": tmp_path}).run() == 2


def test_checks_go_on_after_one_that_failed(tmp_path: Path) -> None:
    checks = Checks("", "", tmp_path, tmp_path, "")
    with checks.that("wrong"):
        equal(1, 2)
    with checks.that("empty"):
        holds("", "text")
    with checks.that("right"):
        equal(1, 1)
    with pytest.raises(SystemExit) as ended:
        checks.finish(["pytest"])
    assert ended.value.code
    report = json.loads((tmp_path / "report.json").read_text())
    assert [check["failure"] for check in report["checks"]] == [
        "AssertionError: 1 is not 2",
        "AssertionError: text: ''",
        None,
    ]
    assert report["versions"]["pytest"]


def test_the_table_names_what_failed(tmp_path: Path) -> None:
    good = ClientReport(client="a", shows="x", checks=[{"check": "c", "failure": None}], versions={"a": "1"})
    bad = ClientReport(client="b", shows="y", checks=[{"check": "c", "failure": "no [text]"}])
    gone = ClientReport(client="d", shows="z", problem="it cannot be installed")
    nothing = ClientReport(client="e", shows="z")
    assert [report.is_well for report in (good, bad, gone, nothing)] == [True, False, False, False]
    out = io.StringIO()
    show([good, bad, gone], Console(file=out, width=120))
    for said in ("1 of 1 checks", "0 of 1 checks", "not run", "b: c: no [text]", "d: it cannot be installed"):
        assert said in out.getvalue()
    save([good, bad], tmp_path / "report.json")
    assert [report["is_well"] for report in json.loads((tmp_path / "report.json").read_text())] == [True, False]


def test_every_client_has_its_files() -> None:
    for client in CLIENTS:
        assert (SCRIPTS / f"{client.group}.txt").is_file()
        assert (SCRIPTS / "scripts" / f"{client.script}.py").is_file()
    assert len({client.name for client in CLIENTS}) == len(CLIENTS)
