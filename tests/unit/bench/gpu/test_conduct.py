"""Parts that hang, crash or come too late leave an error behind, and the next part runs."""

import json
from pathlib import Path

from bench.gpu.conduct import conduct
from bench.gpu.sections import MODELS, SECTIONS, Part, find, plan
from bench.gpu.setting import Setting

DRY = Setting(is_dry=True)


def errors(folder: Path, section: str) -> list[str]:
    return [error["error"] for error in json.loads((folder / f"{section}.json").read_text())["errors"]]


def test_a_part_that_outlasts_its_limit_is_ended(tmp_path: Path) -> None:
    part = Part("checks", "sampling", "sampling_checks:run", limit_s=0.05)
    assert not conduct([part], DRY, tmp_path, 60.0)
    assert "ended after" in errors(tmp_path, "checks")[0]


def test_a_part_that_fails_takes_no_other_with_it(tmp_path: Path) -> None:
    unknown = Part("decode", "none", "nowhere:run", limit_s=60.0)
    assert not conduct([unknown, unknown], DRY, tmp_path, 120.0)
    assert len(errors(tmp_path, "decode")) == 2
    assert "ended with code 1" in errors(tmp_path, "decode")[0]


def test_nothing_is_begun_without_time(tmp_path: Path) -> None:
    assert not conduct(plan(["checks"], []), DRY, tmp_path, 1.0)
    assert errors(tmp_path, "checks") == ["no time was left"] * 4


def test_every_part_is_found_by_its_label() -> None:
    parts = plan(SECTIONS, MODELS)
    assert len({part.label for part in parts}) == len(parts)
    assert all(find(part.label) == part for part in parts)
    assert {part.section for part in parts} == set(SECTIONS)


def test_sections_choose_their_models_unless_told() -> None:
    assert [part.model for part in plan(["decode", "handoff"], [])] == [*MODELS, MODELS[0]]
    assert [part.model for part in plan(["handoff"], [MODELS[1]])] == [MODELS[1]]
