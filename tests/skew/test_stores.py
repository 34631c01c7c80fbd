"""Accounts, stored responses, pins and the journal of one release, read and continued by its neighbours."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cluster import ROOT
from tests.helpers.redis_server import running_redis

SCRIPT = Path(__file__).with_name("stores.py")


def run(root: Path, verb: str, folder: Path, redis: str) -> dict[str, Any]:
    """Content of the stores after `verb`, as the code at `root` reads it."""
    done = subprocess.run(
        [sys.executable, SCRIPT, verb, folder, redis],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    assert Path(said.pop("code")).is_relative_to(root)
    return said


@pytest.mark.parametrize("is_newer_first", [False, True], ids=["update", "rollback"])
def test_what_a_neighbour_wrote_is_read_and_continued(previous: Path, is_newer_first: bool, tmp_path: Path) -> None:
    first, second = (ROOT, previous) if is_newer_first else (previous, ROOT)
    with running_redis() as redis:
        written = run(first, "write", tmp_path, redis.url)
        assert len(written["journal"]) == len(written["pins"]) == 1
        assert written["response"] is not None
        for kind in ("file", "redis"):
            assert written[kind]["entries"][0]["charge_id"] == "done"
            assert written[kind]["keys"][0]["limits"]["budget_nanos"] == 10**12
        assert run(second, "read", tmp_path, redis.url) == written
        settled = run(second, "settle", tmp_path, redis.url)
        for kind in ("file", "redis"):
            assert [entry["charge_id"] for entry in settled[kind]["entries"]] == ["done", "running"]
            assert settled[kind]["spent"] == 2 * 777
        assert run(first, "read", tmp_path, redis.url) == settled
