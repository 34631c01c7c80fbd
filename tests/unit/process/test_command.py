import resource
import subprocess
import sys
from collections.abc import Callable
from typing import ClassVar

import pytest
from pydantic import Field, SecretStr, ValidationError, field_validator

from tandem.cli.load import LoadCommand
from tandem.core.errors import ConfigurationError
from tandem.locality.redis import RedisIndex
from tandem.process.command import run_command
from tandem.process.settings import Settings
from tandem.redis_client import connect

KEY = "sk-0123456789"


class Guarded(Settings, cli_prog_name="guarded"):
    """Refuses every key."""

    key: SecretStr = Field(description="one")
    other_key: SecretStr | None = Field(None, description="another")

    @field_validator("key", "other_key")
    @classmethod
    def _refuse(cls, value: SecretStr) -> SecretStr:
        raise ValueError("too secret")


class Greet(Settings, cli_prog_name="greet"):
    """Greets."""

    count: int = Field(description="how often, times")
    outcome: str = Field("7", description="what happens")

    def run(self) -> int:
        if self.outcome == "refused":
            raise ConfigurationError("count: no\n[red]way")
        if self.outcome == "interrupted":
            raise KeyboardInterrupt
        return int(self.outcome)


class Listed(Settings, cli_prog_name="listed"):
    """Has a setting of each kind that a variable could read otherwise than a flag."""

    numbers: list[float] = Field([], description="some")
    words: list[str] = Field([], description="some")
    name: str | None = Field(None, description="one")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("numbers", value) for value in ("2", "2,8,20", "1e3", "[2, 8]", "", "x", "2,x")),
        *(("words", value) for value in ("a", "a,b", "2", "")),
        *(("name", value) for value in ("null", "None", "none", "")),
    ],
)
def test_a_variable_means_what_its_flag_means(
    setting: str, value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: TANDEM_PLAN_RATE=2,8,20 and TANDEM_STOP=x were refused, and `--name null` was no name."""
    found: list[object] = []

    def serve(settings: Listed) -> int:
        found.append(getattr(settings, setting))
        return 0

    found.append(run_command(Listed, [f"--{setting}", value], serve))
    found.append(capsys.readouterr().err)
    by_flag, found = found, []
    monkeypatch.setenv(f"TANDEM_{setting.upper()}", value)
    found.append(run_command(Listed, [], serve))
    found.append(capsys.readouterr().err)
    assert found == by_flag


def test_help_shows_no_empty_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_command(Listed, ["--help"])
    shown = capsys.readouterr().out
    assert "\0" not in shown
    assert " ".join(shown.split()).endswith("--name TEXT one")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--count", "1"], 7, ""),
        (["--count", "1", "--outcome", "0"], 0, ""),
        ([], 2, "error: --count is required\n"),
        (["--count", "x"], 2, "error: --count='x': Input should be a valid integer"),
        (["--count", "1", "--outcome", "refused"], 2, "error: count: no\n[red]way\n"),
        (["--count", "1", "--outcome", "interrupted"], 130, ""),
    ],
)
def test_settings_and_errors_become_a_code_and_a_line(
    arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(Greet, arguments) == code
    assert capsys.readouterr().err.startswith(said)


def test_a_problem_of_several_settings_shows_none_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: it showed all that was set, the API key among them."""
    assert run_command(LoadCommand, ["--api-key", KEY, "--rate", "1", "--trace", "x"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --rate and --trace are two loads;")
    assert KEY not in said


def test_a_secret_that_is_refused_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(Guarded, ["--key", KEY, "--other-key", KEY]) == 2
    assert capsys.readouterr().err == "error: --key=***: too secret\nerror: --other-key=***: too secret\n"


def test_a_traceback_shows_no_value() -> None:
    with pytest.raises(ValidationError) as refused:
        Guarded.model_validate({"key": KEY, "other_key": KEY})
    assert KEY not in str(refused.value)


@pytest.mark.parametrize("open_index", [RedisIndex, connect])
def test_a_password_that_breaks_its_url_is_not_shown(open_index: Callable[[str], object]) -> None:
    with pytest.raises(
        ConfigurationError, match=r"Redis URL 'redis://redis:6379' is not understood; write .* as %2F"
    ) as refused:
        open_index("redis://:hush/hush@redis:6379")
    assert "hush" not in str(refused.value)


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        run_command(Greet, ["--count", "1", "--outcome", "x"])


def test_help_explains_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command(Greet, ["--help"])
    assert ended.value.code == 0
    page = capsys.readouterr().out
    assert "usage: greet" in page
    assert "how often, times" in page


def test_a_variable_is_read_and_a_flag_wins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TANDEM_COUNT", "1")
    monkeypatch.setenv("TANDEM_OUTCOME", "3")
    assert run_command(Greet, []) == 3
    assert run_command(Greet, ["--outcome", "4"]) == 4


def test_every_command_may_open_many_sockets() -> None:
    """A shell's 1024 open files would be a gateway's 1000 streams."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    code = (
        "import resource as r, sys; from tandem.process.command import run_command\n"
        "from tandem.process.settings import Settings\n"
        "class Told(Settings):\n"
        "    def run(self): print(r.getrlimit(r.RLIMIT_NOFILE)[0]); return 0\n"
        f"r.setrlimit(r.RLIMIT_NOFILE, (64, {hard}))\n"
        "sys.exit(run_command(Told, []))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    most = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    assert int(done.stdout) >= most


class Lists(Settings, cli_prog_name="lists"):
    """Takes several values, and keeps those that it was run with."""

    found: ClassVar[list["Lists"]] = []

    texts: list[str] = Field([], description="as they are")
    numbers: list[float] = Field([], description="several")

    def run(self) -> int:
        self.found.append(self)
        return 0


def test_texts_of_a_repeated_flag_are_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: `--prompt "Hello, world"` was two prompts, and one that began with a bracket was refused."""
    written = ["Hello, world", ' "quoted", ', "[a, {", "\\", "", "--texts"]
    flags = [f"--texts={text}" for text in written]
    assert run_command(Lists, [*flags, "--numbers", "2,5", "--numbers", "9"]) == 0
    assert (Lists.found[-1].texts, Lists.found[-1].numbers) == (written, [2, 5, 9])
    monkeypatch.setenv("TANDEM_TEXTS", '["a, b", "c"]')
    assert run_command(Lists, []) == 0
    assert (Lists.found[-1].texts, Lists.found[-1].numbers) == (["a, b", "c"], [])
