"""PyTorch's threads are told how to wait, and nobody else's."""

import json
import os
import subprocess
import sys

import pytest

_POLICY = "OMP_WAIT_POLICY"
_SCRIPT = f"""
import os, sys
seen = {{}}
import tandem
seen["before"] = os.environ.get("{_POLICY}")
import importlib.util
assert importlib.util.find_spec("torch") is not None
class Watch:  # PyTorch imports it after the libraries that read the variable, and before it is whole
    def find_spec(self, name, path=None, target=None):
        if name == "torch._tensor":
            seen["meanwhile"] = os.environ.get("{_POLICY}")
sys.meta_path.insert(0, Watch())
import torch
seen["after"] = os.environ.get("{_POLICY}")
seen["loader"] = type(torch.__spec__.loader).__name__
import json
print(json.dumps(seen))
"""


def seen(**more: str) -> dict[str, str | None]:
    environment = {name: value for name, value in os.environ.items() if name != _POLICY} | more
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True, env=environment)
    found: dict[str, str | None] = json.loads(done.stdout)
    return found


def test_the_variable_is_there_while_pytorch_is_imported_and_no_longer() -> None:
    assert seen() == {"before": None, "meanwhile": "passive", "after": None, "loader": "SourceFileLoader"}


@pytest.mark.parametrize("value", ["active", "passive"])
def test_what_was_set_stays(value: str) -> None:
    found = seen(OMP_WAIT_POLICY=value)
    assert (found["before"], found["meanwhile"], found["after"]) == (value, value, value)


def test_threads_wait_so() -> None:
    """OpenMP says what it has read."""
    code = "import tandem, torch"
    environment = {name: value for name, value in os.environ.items() if name != _POLICY}
    shown = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=environment | {"OMP_DISPLAY_ENV": "true"},
    ).stderr
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in shown
