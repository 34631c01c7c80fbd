"""Workers that `tandem up` lets lend each other cores."""

import random
from pathlib import Path

import pytest

from tandem.cli.up import UpCommand
from tandem.compute.native.core_board import CoreBoard


def lending(tmp_path: Path, **settings: object) -> str | None:
    up = UpCommand.model_validate({"model": "m", **settings})
    return up.lending(up.topology(Path("m"), random.Random(0)), tmp_path / "cores").core_board


def test_workers_of_one_machine_share_a_board_with_a_slot_each(tmp_path: Path) -> None:
    assert lending(tmp_path, prefill=1, decode=2) == str(tmp_path / "cores")
    assert CoreBoard(tmp_path / "cores", 2).num_slots == 3


@pytest.mark.parametrize("settings", [{"prefill": 0, "decode": 1}, {"lend_cores": False}, {"cpus": "any"}])
def test_nobody_lends_alone_or_when_told_not_to(tmp_path: Path, settings: dict[str, object]) -> None:
    assert lending(tmp_path, **settings) is None
    assert not (tmp_path / "cores").exists()
