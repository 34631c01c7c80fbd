"""Settings of `tandem up`: those of every service are its own too, and variables that nothing reads are told."""

import random
import re
from pathlib import Path

import pytest

from tandem.cli import up
from tandem.cli.service_settings import variables
from tandem.cli.unknown_variables import unknown_variables
from tandem.cli.up import _OWN, UpCommand
from tandem.core.errors import ConfigurationError
from tandem.gateway.settings import GatewaySettings
from tandem.process.command import run_command
from tandem.router.settings import RouterSettings
from tandem.worker.settings import WorkerSettings

DEMO = Path(__file__).parents[3] / "demo" / "tandem-demo"
# Between processes, and of clusters; `tandem up` decides them.
NOT_OF_USERS = {
    *("bind", "advertise", "worker_id", "routers", "workers", "metrics_port", "core_board", "kv_port"),
    *("discovery", "kubernetes_namespace", "kubernetes_selector"),
    *("tls_dir", "insecure"),
}


def test_every_setting_of_a_service_is_one_of_up() -> None:
    for service in (GatewaySettings, RouterSettings, WorkerSettings):
        assert set(service.model_fields) - NOT_OF_USERS <= set(UpCommand.model_fields), service


def test_what_was_set_becomes_variables_of_the_services(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_MAX_ATTEMPTS", "2")
    command = UpCommand.model_validate(
        {"policy": "round-robin", "accounts": "keys.db", "max_body_mib": 4, "dtype": "float32"}
    )
    assert variables(command, _OWN) == {
        "TANDEM_POLICY": "round-robin",
        "TANDEM_ACCOUNTS": "keys.db",
        "TANDEM_MAX_BODY_MIB": "4.0",
        "TANDEM_MAX_ATTEMPTS": "2",
    }


def test_constraints_of_a_service_hold_before_it_is_started(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(UpCommand, ["--max-attempts", "0"]) == 2
    assert "error: --max-attempts='0': Input should be greater than or equal to 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--cpus", "x", "cpus='x' names no cores"),
        ("--cpus", "0-65535", r"cpus names core \d+, which is not one of the \d+ that may be used here: "),
        ("--decode", "0", "--decode="),
        ("--transport", "pigeon", "--transport="),
        ("--dp", "2", "--dp='2': engines beside each other are workers .* give --decode N and --prefill N"),
        ("--ep", "2", "--ep='2': --tp N divides experts too"),
        ("--cluster-secret", "short", "cluster_secret has 5 bytes"),
        ("--redis", "redis://127.0.0.1:1", "--redis needs a cluster secret"),
        ("--policy", "none", "--policy='none': use one of predicted-cost, "),
        ("--allowed-origins", "page", "--allowed-origins='page': 'page' is not scheme://host"),
        ("--log-level", "loud", "--log-level='loud': Input should be 'debug', "),
        ("--dtype", "float8", "dtype='float8' is not served; choose one of auto, float32, "),
        ("--block-size", "7", "block_size=7 is not served; choose one of 8, 16, "),
        ("--speculate", "draft", "speculate='draft' is no drafter; choose "),
        ("--num-speculative-tokens", "33", "--num-speculative-tokens='33': Input should be less than or equal to 32"),
        ("--max-num-running", "0", "max_num_running=0 must be from 1 to "),
        ("--tool-parser", "other", "no tool parser is called 'other'; it may be auto, none, "),
        ("--attention-backend", "other", "attention_backend='other' is unknown; choose auto or one of "),
        (
            "--attention-backend",
            "triton",
            "attention_backend='triton' cannot serve this model on cpu: ",
        ),
        ("--moderation", "other", "moderation='other' is unknown; use blocklist:FILE, "),
        ("--moderation", "blocklist:/none", "the blocklist /none cannot be read: "),
        ("--accounts", "/none/keys.db", "accounts='/none/keys.db' cannot be used as an SQLite file: "),
        ("--accounts", "redis://[", r"Redis URL 'redis://\[' is not understood; write "),
        ("--reasoning-parser", "other", "no reasoning parser is called 'other'; it may be auto, none, "),
    ],
)
def test_a_mistake_is_one_line_before_anything_starts(
    capsys: pytest.CaptureFixture[str], flag: str, value: str, message: str
) -> None:
    """Regression: several of these were refused by a service, half a minute later."""
    assert run_command(UpCommand, ["--model", str(DEMO), "--port", "0", flag, value]) == 2
    told = capsys.readouterr()
    assert re.match(f"error: {message}", told.err), told.err
    assert told.err.count("\n") == 1
    assert told.out == ""


@pytest.mark.parametrize("settings", [UpCommand, GatewaySettings, RouterSettings, WorkerSettings])
def test_help_never_says_null(settings: type[UpCommand], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_command(settings, ["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "default: null" not in text
    assert "(default: )" not in text
    if settings is UpCommand:
        assert "omitted: automatic, by the device" in text
        assert "(router, default: 5.0; worker, default: 120.0)" in text


def test_a_mistyped_variable_is_told_with_the_nearest_name() -> None:
    names = ["PATH", "TANDEM_POLICIY", "TANDEM_POLICY", "TANDEM_CACHE_DIR", "TANDEM_QQQQQQQQQQQQ", "TANDEM_LOAD_URL"]
    assert list(unknown_variables(names, UpCommand.model_fields)) == [
        "warning: TANDEM_POLICIY is set but has no effect here; TANDEM_POLICY is the nearest that has one",
        "warning: TANDEM_QQQQQQQQQQQQ is set but has no effect here",
    ]


def test_no_process_sees_a_variable_of_processes_started_otherwise() -> None:
    """TANDEM_ADVERTISE=auto, as the worker image has it, had workers announce an address at which none listens."""
    command = UpCommand.model_validate({"device": "cpu"})
    for spec in command.topology(Path("m"), random.Random(1)).specs():
        assert {f"TANDEM_{name.upper()}" for name in NOT_OF_USERS} <= spec.without_env, spec.name


@pytest.mark.parametrize("setting", ["port", "admin_bind"])
def test_no_process_gets_the_port_that_the_gateway_was_given(setting: str) -> None:
    def ports(**options: object) -> tuple[int, ...]:
        command = UpCommand.model_validate({"device": "cpu", **options})
        return command.topology(Path("m"), random.Random(1)).ports

    taken = ports()[0]
    assert taken not in ports(**{setting: taken if setting == "port" else f"127.0.0.1:{taken}"})


def tp_of(*arguments: str, flag: str = "--tp") -> dict[str, str]:
    """--tp, or another setting of ranks, of each worker."""
    command = UpCommand.model_validate(dict(zip(arguments[::2], arguments[1::2], strict=True)) | {"device": "cpu"})
    started = command.topology(Path("m"), random.Random(1)).specs()
    specs = [spec for spec in started if spec.name.startswith(("pre", "dec"))]
    assert not any({"TANDEM_TP", "TANDEM_PP", "TANDEM_CP"} & spec.env.keys() for spec in specs)
    return {spec.name: spec.argv[spec.argv.index(flag) + 1] for spec in specs if flag in spec.argv}


def test_roles_have_widths_of_their_own() -> None:
    assert tp_of() == {}
    assert tp_of("tp", "2") == {"prefill-0": "2", "decode-0": "2"}
    assert tp_of("prefill_tp", "4") == {"prefill-0": "4"}
    assert tp_of("tp", "2", "decode_tp", "1", "prefill", "2") == {"prefill-0": "2", "prefill-1": "2"}
    with pytest.raises(ConfigurationError, match="--prefill-tp=2 with --prefill 0: there are no prefill workers"):
        tp_of("prefill", "0", "prefill_tp", "2")


def test_roles_have_stages_of_their_own() -> None:
    assert tp_of("tp", "2", "pp", "2", flag="--pp") == {"prefill-0": "2", "decode-0": "2"}
    assert tp_of("prefill_pp", "3", flag="--pp") == {"prefill-0": "3"}
    assert tp_of("prefill_pp", "3") == {}
    with pytest.raises(ConfigurationError, match="--prefill-pp=2 with --prefill 0: there are no prefill workers"):
        tp_of("prefill", "0", "prefill_pp", "2")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--tp", "4"), "a prefill worker of 4 ranks, and 2 cores: .* at most 2 ranks by tp, pp and cp, or --cpus any"),
        (("--decode-pp", "2", "--decode-tp", "2"), "a decode worker of 4 ranks, and 2 cores"),
        (("--prefill-cp", "3"), "a prefill worker of 3 ranks, and 2 cores"),
        (("--tp", "2", "--cpus", "0"), "a prefill worker of 2 ranks, and 1 cores: .* at most 1 ranks"),
    ],
)
def test_more_ranks_than_cores_are_refused_with_what_fits(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up, "own_cpus", lambda: [0, 1])
    assert run_command(UpCommand, ["--model", str(DEMO), "--port", "0", *arguments]) == 2
    assert re.match(f"error: {words}", capsys.readouterr().err)


def test_as_many_ranks_as_cores_and_more_that_take_turns_are_checked_no_further(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(up, "own_cpus", lambda: [0, 1])
    for settings in ({"tp": 2}, {"tp": 4, "cpus": "any"}):
        command = UpCommand.model_validate({"model": str(DEMO), "device": "cpu", "port": 0, **settings})
        command._check(DEMO, command.topology(DEMO, random.Random(1)))


def test_prefill_workers_alone_have_contexts() -> None:
    assert tp_of("cp", "2", "tp", "2", flag="--cp") == {"prefill-0": "2"}
    assert tp_of("cp", "2", "prefill_cp", "4", flag="--cp") == {"prefill-0": "4"}
    assert tp_of("cp", "2") == {}
    for setting in ("cp", "prefill_cp"):
        words = f"--{setting.replace('_', '-')}=2 with --prefill 0: there are no prefill workers"
        with pytest.raises(ConfigurationError, match=words):
            tp_of("prefill", "0", setting, "2")
