"""Findings of an audit, and the error of one that had nothing to compare with."""

from dataclasses import dataclass

from tools.supply.advisories import Finding


class NoAdvisoriesError(RuntimeError):
    """No advisories could be had, so nothing was audited; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Report:
    """Args:
    source: whose advisories, for people.
    gap: what they cannot know of, and the remedy; "" = nothing.
    """

    source: str
    findings: tuple[Finding, ...]
    gap: str = ""
