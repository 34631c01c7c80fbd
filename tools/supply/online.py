"""Asks PyPI, then OSV, for the advisories of pinned versions, by pip-audit.

pip-audit ends with 0 where its service knows none of the packages, so what it skipped is counted here.
"""

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.supply.advisories import Finding
from tools.supply.pins import ROOT, Pin
from tools.supply.report import NoAdvisoriesError, Report

PIP_AUDIT = ROOT / "build" / "supply" / "bin" / "pip-audit"
SERVICES = ("pypi", "osv")
_TIMEOUT_S = 600.0


def ask_online(pins: Sequence[Pin], pip_audit: Path = PIP_AUDIT) -> Report:
    """Report of the first service that knows the packages.

    Raises:
        NoAdvisoriesError: none of them answers; each one's words are in the message.
    """
    with tempfile.TemporaryDirectory() as scratch:
        requirements = Path(scratch) / "requirements.txt"
        requirements.write_text("".join(f"{pin.name}=={pin.version.public}\n" for pin in pins))
        reasons = []
        for service in SERVICES:
            answer, words = _ask(service, requirements, Path(scratch) / f"{service}.json", pip_audit)
            if answer is None:
                reasons.append(f"{service}: {words}")
                continue
            audited = [each for each in answer["dependencies"] if "skip_reason" not in each]
            if audited:
                return _report(service, audited, answer["dependencies"])
            reasons.append(f"{service}: knows none of the {len(pins)} packages")
    raise NoAdvisoriesError(
        f"no advisories could be reached ({'; '.join(reasons)}); run this where they can be, or bring advisories in "
        "the OSV format (a checkout of the Python Packaging Advisory Database, or OSV's PyPI export): "
        "make audit ARGS='--advisories PATH'"
    )


def _ask(service: str, requirements: Path, output: Path, pip_audit: Path) -> tuple[dict[str, Any] | None, str]:
    """(its answer or None, the last line it said)."""
    options = ("--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json", "--aliases", "on")
    files = ("--requirement", str(requirements), "--output", str(output), "--vulnerability-service", service)
    command = [str(pip_audit), *options, *files]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return None, f"no answer within {_TIMEOUT_S:g} s"
    words = done.stderr.strip().splitlines() or [f"pip-audit ended with {done.returncode}"]
    if not output.exists() or not output.read_text().strip():
        return None, words[-1]
    answer: dict[str, Any] = json.loads(output.read_text())
    return answer, words[-1]


def _report(service: str, audited: Sequence[Mapping[str, Any]], asked: Sequence[Mapping[str, Any]]) -> Report:
    findings = [
        Finding(
            each["name"],
            each["version"],
            found["id"],
            tuple(found.get("aliases", ())),
            tuple(found["fix_versions"]),
            (found.get("description") or "").strip().partition("\n")[0],
        )
        for each in audited
        for found in each["vulns"]
    ]
    unknown = [each["name"] for each in asked if "skip_reason" in each]
    gap = f"{service} does not know {', '.join(unknown)}; audit them by hand, or by --advisories" if unknown else ""
    return Report(f"advisories of {service}, asked now", tuple(findings), gap)
