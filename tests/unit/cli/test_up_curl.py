"""The line with which `tandem up` says how to ask."""

import json
import os
import shlex
import subprocess

import pytest

from tandem.cli.up import _curl


@pytest.mark.parametrize("needs_key", [True, False])
def test_a_shell_makes_a_request_of_it(needs_key: bool) -> None:
    line = _curl("http://127.0.0.1:1", "it's", has_chat=True, needs_key=needs_key)
    said = subprocess.run(
        ["bash", "-c", line.replace("curl", r"printf '%s\n'", 1)],
        env={**os.environ, "KEY": "sk-1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert ("authorization: Bearer sk-1" in said) == needs_key
    assert json.loads(said[-1])["model"] == "it's"
    assert shlex.split(line)[0] == "curl"
