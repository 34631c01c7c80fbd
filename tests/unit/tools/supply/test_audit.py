"""`make audit`: what fails it, what passes, and that nothing passes as audited which was not."""

import json
import sys
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from tools.supply.accepted import Acceptance, read_acceptances
from tools.supply.advisories import Finding
from tools.supply.audit import ask_offline, main, tell
from tools.supply.online import ask_online
from tools.supply.pins import Pin
from tools.supply.report import NoAdvisoriesError, Report

TODAY = date(2026, 11, 25)
NOW = datetime(2026, 11, 25, tzinfo=UTC)
PINS = (Pin("starlette", Version("1.10.0"), None, ()), Pin("torch", Version("2.13.0+cpu"), None, ()))
FINDING = Finding("torch", "2.13.0", "PYSEC-1", ("CVE-1",), ("2.14.0",), "It leaks.")


def advisories(directory: Path, package: str, modified: datetime = NOW) -> Path:
    record = {
        "id": "PYSEC-1",
        "aliases": ["CVE-1"],
        "modified": modified.isoformat(),
        "affected": [
            {
                "package": {"ecosystem": "PyPI", "name": package},
                "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}]}],
            }
        ],
    }
    (directory / "PYSEC-1.json").write_text(json.dumps(record))
    return directory


def test_a_known_vulnerability_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--advisories", str(advisories(tmp_path, "Starlette", datetime.now(UTC)))]) == 1
    out = capsys.readouterr().out
    assert "starlette 1.10.0: PYSEC-1 (CVE-1), no version fixes it" in out
    assert "1 known vulnerabilities, 1 not accepted" in out


def test_sound_versions_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--advisories", str(advisories(tmp_path, "not-used-here", datetime.now(UTC)))]) == 0
    assert "0 known vulnerabilities" in capsys.readouterr().out


@pytest.mark.parametrize(("flags", "code"), [((), 3), (("--allow-no-data",), 0), (("--max-age-days", "9999"), 0)])
def test_old_advisories_do_not_pass_for_an_audit(
    tmp_path: Path, flags: tuple[str, ...], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = advisories(tmp_path, "not-used-here", datetime.now(UTC) - timedelta(days=31))
    assert main(["--advisories", str(path), *flags]) == code
    said = "NOT AUDITED IN FULL: they know nothing of the last 31 days" in capsys.readouterr().out
    assert said != ("--max-age-days" in flags)


def test_allowing_no_data_allows_no_vulnerability(tmp_path: Path) -> None:
    path = advisories(tmp_path, "starlette", datetime.now(UTC) - timedelta(days=31))
    assert main(["--advisories", str(path), "--allow-no-data"]) == 1


def test_a_wrong_path_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--advisories", str(tmp_path / "none")]) == 2
    assert "none does not exist" in capsys.readouterr().err


def test_a_local_build_is_asked_for_too(tmp_path: Path) -> None:
    report = ask_offline(PINS, advisories(tmp_path, "torch"), NOW, timedelta(days=30))
    assert [finding.version for finding in report.findings] == ["2.13.0+cpu"]
    assert report.gap == ""


@pytest.mark.parametrize(("known", "until", "code"), [("CVE-1", 25, 0), ("PYSEC-1", 30, 0), ("CVE-1", 24, 1)])
def test_what_is_accepted_passes_until_its_last_day(
    known: str, until: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    accepted = [Acceptance(known, date(2026, 11, until), "it is never called", None)]
    assert tell(Report("a test", (FINDING,)), accepted, 1, TODAY) == code
    out = capsys.readouterr().out
    assert ("accepted: it is never called" in out) == (code == 0)
    assert (f"{known} was accepted until 2026-11-{until} only" in out) == (code == 1)


@pytest.mark.parametrize(
    "table",
    [
        'id = "CVE-1"\nreason = "x"',
        'id = "CVE-1"\nuntil = 2027-01-01',
        'id = "CVE-1"\nuntil = "soon"\nreason = "x"',
        'id = "CVE-1"\nuntil = 2027-01-01\nreason = " "',
        'id = "CVE-1"\nuntil = 2027-01-01\nreason = "x"\nfor = 3',
        "id = ",
    ],
)
def test_acceptances_without_reason_or_end_are_refused(tmp_path: Path, table: str) -> None:
    path = tmp_path / "accepted.toml"
    path.write_text(f"[[accepted]]\n{table}\n")
    with pytest.raises(ValueError, match=r"accepted\.toml"):
        read_acceptances(path)


def pip_audit(directory: Path, answers: dict[str, Any]) -> Path:
    """A program in pip-audit's place: writes the answer for the service it is told, or fails as it does offline."""
    program = directory / "pip-audit"
    program.write_text(
        f"#!{sys.executable}\n"
        "import json, sys\n"
        f"answer = {answers!r}.get(sys.argv[sys.argv.index('--vulnerability-service') + 1])\n"
        "if answer is None: sys.exit('ConnectionError: nothing answers')\n"
        "open(sys.argv[sys.argv.index('--output') + 1], 'w').write(json.dumps({'dependencies': answer}))\n"
        "sys.exit(any(each.get('vulns') for each in answer))\n"
    )
    program.chmod(0o755)
    return program


SOUND = {"name": "starlette", "version": "1.10.0", "vulns": []}
SICK = {
    "name": "torch",
    "version": "2.13.0",
    "vulns": [{"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["2.14.0"], "description": "It leaks.\nSo."}],
}
UNKNOWN = [{"name": pin.name, "skip_reason": "Dependency not found on PyPI"} for pin in PINS]


def test_what_the_first_service_knows(tmp_path: Path) -> None:
    report = ask_online(PINS, pip_audit(tmp_path, {"pypi": [SOUND, SICK]}))
    assert report == Report("advisories of pypi, asked now", (FINDING,))


def test_a_service_that_knows_no_package_did_not_audit(tmp_path: Path) -> None:
    """pip-audit itself ends with 0 then, as if everything were sound."""
    report = ask_online(PINS, pip_audit(tmp_path, {"pypi": UNKNOWN, "osv": [SOUND, SICK]}))
    assert report.source == "advisories of osv, asked now"
    with pytest.raises(NoAdvisoriesError, match="pypi: knows none of the 2 packages; osv: ConnectionError: nothing"):
        ask_online(PINS, pip_audit(tmp_path, {"pypi": UNKNOWN}))


def test_packages_that_a_service_skipped_are_not_audited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = ask_online(PINS, pip_audit(tmp_path, {"pypi": [SOUND, UNKNOWN[1]]}))
    assert tell(report, (), 2, TODAY) == 3
    assert "NOT AUDITED IN FULL: pypi does not know torch" in capsys.readouterr().out
