"""Versions that an advisory of the OSV format affects."""

import json
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from tools.supply.advisories import Advisories


def advisory(*events: dict[str, str], versions: tuple[str, ...] = (), **changes: Any) -> dict[str, Any]:
    affected = {
        "package": {"ecosystem": "PyPI", "name": "Some_Package"},
        "ranges": [{"type": "ECOSYSTEM", "events": list(events)}],
        "versions": list(versions),
    }
    return {"id": "PYSEC-1", "modified": "2026-11-01T00:00:00Z", "affected": [affected], **changes}


def affects(record: dict[str, Any], version: str) -> bool:
    return bool(Advisories([record]).findings("some-package", Version(version)))


@pytest.mark.parametrize(
    ("version", "is_affected"), [("0.9", False), ("1.0", True), ("1.9.9", True), ("2.0", False), ("2.0rc1", True)]
)
def test_from_the_first_version_that_has_it_to_the_one_that_mends_it(version: str, is_affected: bool) -> None:
    assert affects(advisory({"introduced": "1.0"}, {"fixed": "2.0"}), version) == is_affected


@pytest.mark.parametrize(("version", "is_affected"), [("0.0.1.dev1", True), ("1.5", True), ("1.5.1", False)])
def test_the_last_affected_version_is_affected(version: str, is_affected: bool) -> None:
    assert affects(advisory({"introduced": "0"}, {"last_affected": "1.5"}), version) == is_affected


@pytest.mark.parametrize(("version", "is_affected"), [("1.1", True), ("1.3", False), ("2.1", True), ("2.3", False)])
def test_each_line_of_releases_has_its_range(version: str, is_affected: bool) -> None:
    events = ({"introduced": "2.0"}, {"introduced": "1.0"}, {"fixed": "1.2"}, {"fixed": "2.2"})
    assert affects(advisory(*events), version) == is_affected


@pytest.mark.parametrize(
    "events",
    [
        ({"introduced": "0"}, {"last_affected": "2.6.0-NA"}),
        ({"introduced": "0"}, {"fixed": "next release"}),
        ({"introduced": "ages ago"},),
    ],
    ids=["last-affected", "fixed", "introduced"],
)
def test_what_is_no_version_frees_none(events: tuple[dict[str, str], ...]) -> None:
    """As records of torch have it: whoever cannot tell where a range ends must not say that it has ended."""
    assert affects(advisory(*events), "9.0")


def test_versions_by_name_without_a_range() -> None:
    record = advisory(versions=("1.0.0", "not-a-version"))
    assert affects(record, "1.0")
    assert not affects(record, "1.1")


def test_a_local_build_is_affected_as_the_public_one() -> None:
    assert affects(advisory({"introduced": "0"}, {"last_affected": "2.13.0"}), "2.13.0+cpu")


def test_ranges_of_commits_and_other_ecosystems_say_nothing() -> None:
    record = advisory()
    record["affected"][0]["ranges"] = [{"type": "GIT", "events": [{"introduced": "0"}]}]
    assert not affects(record, "1.0")
    record = advisory({"introduced": "0"})
    record["affected"][0]["package"]["ecosystem"] = "npm"
    assert not affects(record, "1.0")


def test_withdrawn_advisories_are_left_out() -> None:
    assert not affects(advisory({"introduced": "0"}, withdrawn="2026-11-02T00:00:00Z"), "1.0")


def test_what_a_finding_says() -> None:
    events = ({"introduced": "0"}, {"fixed": "2.0"})
    record = advisory(*events, aliases=["CVE-1"], details="It leaks.\nAt length.")
    (finding,) = Advisories([record]).findings("some-package", Version("1.0"))
    assert finding.ids == {"PYSEC-1", "CVE-1"}
    assert (finding.fixed, finding.summary) == (("2.0",), "It leaks.")


def test_folders_and_zip_files_of_both_formats(tmp_path: Path) -> None:
    record = advisory({"introduced": "0"})
    (tmp_path / "vulns" / "some-package").mkdir(parents=True)
    (tmp_path / "vulns" / "some-package" / "PYSEC-1.yaml").write_text(json.dumps(record))
    (tmp_path / "README.md").write_text("no advisory")
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("PYSEC-1.json", json.dumps(record))
    for path in (tmp_path, tmp_path / "all.zip"):
        advisories = Advisories.read(path)
        assert len(advisories) == 1
        assert advisories.findings("some-package", Version("1.0"))


def test_times_to_come_do_not_make_advisories_new() -> None:
    records = [advisory(modified="2026-07-23T10:00:00Z"), advisory(modified="2027-07-09T00:00:00Z")]
    now = datetime(2026, 11, 25, tzinfo=UTC)
    assert Advisories(records).newest(now) == datetime(2026, 7, 23, 10, tzinfo=UTC)


@pytest.mark.parametrize("content", ["{}", "[]", '{"id": "X"}', "{"])
def test_files_that_are_no_advisories_are_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ValueError, match=r"x\.json is no advisory of the OSV format"):
        Advisories.read(tmp_path)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no advisories"):
        Advisories.read(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"modified": "lately"},
        {"affected": [{"package": {"ecosystem": "PyPI"}}]},
        {"affected": [{"package": {"ecosystem": "PyPI", "name": "x"}, "ranges": [{"type": "ECOSYSTEM"}]}]},
        {"affected": ["x"]},
    ],
    ids=["time", "no-name", "no-events", "text"],
)
def test_advisories_of_another_form_are_named(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="PYSEC-1 is no advisory of the OSV format"):
        Advisories([advisory(**changes)])
