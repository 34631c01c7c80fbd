"""Parts of pip's configuration that go into a build: every setting, the environment's first, and their folders."""

import stat
from pathlib import Path

from tools.images.pip_access import PipAccess, parse


def test_every_setting_is_passed_and_the_environment_wins() -> None:
    listing = (
        "global.index-url='https://a.example/simple'\n:env:.index-url='https://b.example/simple'\nglobal.timeout='9'"
    )
    assert parse(listing) == PipAccess("[global]\nindex-url = https://b.example/simple\ntimeout = 9\n", ())


def test_settings_of_one_command_and_of_this_machine_are_left_out() -> None:
    assert parse("install.user='true'\nglobal.cache-dir='/tmp'\nglobal.log='/tmp/x'").config == "[global]\n"


def test_folders_are_mounted_and_an_index_with_what_lies_beside_it(tmp_path: Path) -> None:
    wheels, index = tmp_path / "wheels", tmp_path / "index"
    (index / "simple").mkdir(parents=True)
    wheels.mkdir()
    access = parse(
        f"global.extra-index-url='file://{index}/simple file://{tmp_path}/none'\n:env:.find-links='{wheels}'"
    )
    assert access.folders == (index, wheels)


def test_the_path_of_an_url_is_no_folder(tmp_path: Path) -> None:
    assert parse(f"global.index-url='https://host.example{tmp_path}'").folders == ()


def test_the_secret_is_for_us_alone(tmp_path: Path) -> None:
    flags = PipAccess("[global]\nindex-url = https://user:word@a.example\n", (Path("/opt"),)).arguments(tmp_path)
    assert flags == ["--secret", f"id=pip,src={tmp_path}/pip.conf", "--volume", "/opt:/opt:ro"]
    assert stat.S_IMODE((tmp_path / "pip.conf").stat().st_mode) == 0o600
