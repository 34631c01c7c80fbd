"""Reads what `docker/compose.yaml` runs, as plain data, and fills in its secrets."""

import re
from collections.abc import Sequence

import yaml

from tests.helpers.helm import ROOT, Object


def compose_services() -> Object:
    """Services by name."""
    services: Object = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    return services


def filled(words: Sequence[str], secret: str) -> list[str]:
    """The words with each required variable replaced by `secret`."""
    return [re.sub(r"\$\{\w+:\?[^}]+\}", secret, word) for word in words]
