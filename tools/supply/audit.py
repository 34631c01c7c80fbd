"""`make audit`: asks whether any pinned version has a known vulnerability, and fails if one was not accepted.

Audited are constraints.txt and every lock. Advisories come from a folder or zip file in the OSV format where one is
named, else from PyPI or OSV by pip-audit. Where neither answers, nothing was audited, which is said and fails.

Exit codes: 0 no vulnerability but accepted ones, 1 some, 2 wrong input, 3 none was found but something not audited.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

from tools.supply.accepted import ACCEPTED, Acceptance, read_acceptances
from tools.supply.advisories import Advisories, Finding
from tools.supply.online import ask_online
from tools.supply.pins import CONSTRAINTS, Pin, lock_files, read_pins
from tools.supply.report import NoAdvisoriesError, Report

VULNERABLE, WRONG_INPUT, NO_DATA = 1, 2, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="make audit", description=__doc__)
    parser.add_argument("--advisories", type=Path, help="folder or zip file of advisories; default: ask PyPI and OSV")
    parser.add_argument("--max-age-days", type=int, default=30, help="age of advisories' newest change; default: 30")
    parser.add_argument("--allow-no-data", action="store_true", help="end with 0 where no advisories can be had")
    arguments = parser.parse_args(argv)
    today = datetime.now(UTC)
    pins = _distinct(pin for path in (CONSTRAINTS, *lock_files()) for pin in read_pins(path))
    try:
        accepted = read_acceptances(ACCEPTED)
        if arguments.advisories is None:
            report = ask_online(pins)
        else:
            report = ask_offline(pins, arguments.advisories, today, timedelta(days=arguments.max_age_days))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_INPUT
    except NoAdvisoriesError as error:
        print(f"NOT AUDITED: {error}")
        return 0 if arguments.allow_no_data else NO_DATA
    code = tell(report, accepted, len(pins), today.date())
    return 0 if code == NO_DATA and arguments.allow_no_data else code


def ask_offline(pins: Iterable[Pin], path: Path, now: datetime, max_age: timedelta) -> Report:
    """Report of the advisories at `path`. If they are older than `max_age`, what was found since is a gap.

    Raises:
        ValueError: they cannot be read.
    """
    if not path.exists():
        raise ValueError(f"--advisories={path} does not exist; name a folder or a zip file")
    advisories = Advisories.read(path)
    findings = [finding for pin in pins for finding in advisories.findings(pin.name, pin.version)]
    newest = advisories.newest(now)
    source = f"{len(advisories)} advisories of {path}, changed last on {newest:%Y-%m-%d}"
    gap = f"they know nothing of the last {(now - newest).days} days; bring newer ones, or allow their age by "
    return Report(source, tuple(findings), f"{gap}--max-age-days" if now - newest > max_age else "")


def tell(report: Report, accepted: Sequence[Acceptance], num_pins: int, today: date) -> int:
    """Print the report; returns the exit code."""
    valid = {each.id: each for each in accepted if today <= each.until}
    open_findings = [finding for finding in report.findings if not finding.ids & valid.keys()]
    for finding in report.findings:
        reasons = [valid[each].reason for each in sorted(finding.ids) if each in valid]
        print(_line(finding) + (f"; accepted: {reasons[0]}" if reasons else ""))
    for each in accepted:
        if each.id not in valid:
            print(f"{each.id} was accepted until {each.until} only: decide anew in {ACCEPTED.name}")
    print(
        f"{num_pins} pinned versions, {len(report.findings)} known vulnerabilities, {len(open_findings)} not accepted "
        f"({report.source})"
    )
    if report.gap:
        print(f"NOT AUDITED IN FULL: {report.gap}")
    return VULNERABLE if open_findings else NO_DATA if report.gap else 0


def _line(finding: Finding) -> str:
    also = f" ({', '.join(finding.aliases)})" if finding.aliases else ""
    remedy = f"fixed in {', '.join(finding.fixed)}" if finding.fixed else "no version fixes it"
    return f"{finding.package} {finding.version}: {finding.id}{also}, {remedy}: {finding.summary}"


def _distinct(pins: Iterable[Pin]) -> tuple[Pin, ...]:
    by_version = {(pin.name, pin.version.public): pin for pin in pins}
    return tuple(by_version[key] for key in sorted(by_version))


if __name__ == "__main__":
    sys.exit(main())
