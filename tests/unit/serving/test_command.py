import resource
import subprocess
import sys

import pytest
from pydantic import Field

from tandem.core.errors import ConfigurationError
from tandem.serving.command import run_command
from tandem.serving.settings import Settings


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
        "import resource as r, sys; from tandem.serving.command import run_command\n"
        "from tandem.serving.settings import Settings\n"
        "class Told(Settings):\n"
        "    def run(self): print(r.getrlimit(r.RLIMIT_NOFILE)[0]); return 0\n"
        f"r.setrlimit(r.RLIMIT_NOFILE, (64, {hard}))\n"
        "sys.exit(run_command(Told, []))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    most = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    assert int(done.stdout) >= most
