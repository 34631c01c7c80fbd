"""Start and end of Tandem in the race."""

import sys
from pathlib import Path

import pytest

from bench.race.ours import Tandem, ours
from tandem.cli.up import UpCommand
from tandem.core.errors import UnavailableError
from tandem.process.settings import EngineSettings


def test_both_ways_serve_the_same_model_with_the_same_engine(tmp_path: Path) -> None:
    one, split = ours(tmp_path, ["--block-size", "32"])
    assert (one.name, split.name) == ("tandem", "tandem-1p1d")
    differing = set(zip(one.command(tmp_path, 1), split.command(tmp_path, 1), strict=True))
    assert {pair for pair in differing if pair[0] != pair[1]} == {("0", "1")}


def test_with_drafts_it_is_run_once_more(tmp_path: Path) -> None:
    one, split, drafting = ours(tmp_path, ["--block-size", "32"], "auto")
    assert (one, split) == ours(tmp_path, ["--block-size", "32"])
    assert drafting.name == "tandem-drafts"
    assert drafting.command(tmp_path, 1) == [*one.command(tmp_path, 1), "--speculate", "auto"]


def test_every_flag_is_one_of_tandem_up(tmp_path: Path) -> None:
    command = ours(tmp_path, speculate="auto")[-1].command(tmp_path, 28000)
    assert command[:4] == [sys.executable, "-m", "tandem.cli.main", "up"]
    flags = {flag.removeprefix("--").replace("-", "_") for flag in command if flag.startswith("--")}
    assert flags <= UpCommand.model_fields.keys() | EngineSettings.model_fields.keys()


def test_answers_have_exactly_the_length_that_is_asked_for(tmp_path: Path) -> None:
    assert ours(tmp_path)[0].body([1], 5) == {"ignore_eos": True, "return_token_ids": True}


def test_one_that_cannot_start_says_why(tmp_path: Path) -> None:
    system = Tandem("tandem", 0, tmp_path)
    with pytest.raises(UnavailableError, match="is not a directory"), system.serve(tmp_path / "nothing"):
        raise AssertionError("it started")
    assert (tmp_path / "tandem.log").exists()
