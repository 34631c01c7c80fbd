"""The model of the hand-off, checked over every interleaving by Spin; and that each safeguard in it is needed."""

import shutil
import subprocess
from pathlib import Path

import pytest

_MODEL = Path(__file__).with_name("handoff.pml")
_FAULTS = {
    "WITHOUT_LEASES": "block[0]==1",
    "WITHOUT_HOLDS_UNDER_LEASES": "block[0]==1",
    "WITHOUT_CONFIRMING_AFTER_THE_READ": "block[0]==1",
    "WITH_RENEWALS_THAT_REVIVE": "block[0]==1",
    "WITHOUT_WAITING_FOR_FORMER_READS": "block[0]==1",
    "WITH_FALLBACK_INTO_THE_SAME_BLOCK": "block[0]==1",
    "WITHOUT_TRANSFER_HOLDS": "holds>0",
    "WITHOUT_A_FENCE": "!(freed)",
}
_MISSING = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]

pytestmark = pytest.mark.skipif(
    bool(_MISSING), reason=f"the model checker needs {' and '.join(_MISSING)}: install the package of that name"
)


def test_no_interleaving_uses_or_overwrites_foreign_bytes_or_leaves_anything_held(tmp_path: Path) -> None:
    report = _check(tmp_path)

    assert "errors: 0" in report, report
    assert "max search depth too small" not in report, "the search was cut short"
    assert "Search not completed" not in report, report


@pytest.mark.parametrize("fault", sorted(_FAULTS))
def test_without_a_safeguard_there_is_a_counterexample(fault: str, tmp_path: Path) -> None:
    report = _check(tmp_path, fault)

    assert "errors: 1" in report, report
    violated = next(line for line in report.splitlines() if "assertion violated" in line)
    assert _FAULTS[fault] in violated


def test_the_block_is_used_in_some_run(tmp_path: Path) -> None:
    """Otherwise the model would be right because nothing happens in it."""
    assert "errors: 1" in _check(tmp_path, "WITH_A_CLAIM_THAT_NOTHING_IS_USED")


def _check(directory: Path, fault: str | None = None) -> str:
    """Output of Spin's verifier for the model."""
    defines = [] if fault is None else [f"-D{fault}"]
    _run(directory, "spin", *defines, "-a", str(_MODEL))
    _run(directory, "gcc", "-w", "-O1", "-DSAFETY", "-o", "pan", "pan.c")
    return _run(directory, "./pan", "-m100000")


def _run(directory: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
