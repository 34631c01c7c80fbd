import pytest
from pydantic import ValidationError
from pydantic_settings import CliApp

from tandem.core.errors import ConfigurationError
from tandem.planner_service.settings import PlannerSettings
from tandem.process.command import run_command


def settings(**fields: object) -> PlannerSettings:
    return PlannerSettings.model_validate({"gateways": "127.0.0.1:8000", **fields})


def test_by_default_it_only_advises_and_asks_no_api() -> None:
    found = settings()
    assert (found.mode, found.needs_kubernetes, found.metrics_port) == ("advise", False, 7951)
    assert found.gateway_addresses == ("127.0.0.1:8000",)
    assert found.router_addresses == ("127.0.0.1:7800",)


def test_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "MODE": "act",
        "GATEWAYS": "a:1, b:2",
        "PREFILL_DEPLOYMENT": "p",
        "DECODE_DEPLOYMENT": "d",
    }.items():
        monkeypatch.setenv(f"TANDEM_{name}", value)
    found = CliApp.run(PlannerSettings, cli_args=[])
    assert (found.mode, found.gateway_addresses, found.needs_kubernetes) == ("act", ("a:1", "b:2"), True)


def test_it_may_have_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: help said that `none` means this, and `none` was refused as no integer."""
    asked = ["--gateways", "a:1"]
    assert CliApp.run(PlannerSettings, cli_args=[*asked, "--metrics-port", "none"]).metrics_port is None
    monkeypatch.setenv("TANDEM_METRICS_PORT", "none")
    assert CliApp.run(PlannerSettings, cli_args=asked).metrics_port is None


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"min_prefill": 5, "max_prefill": 2}, "min_prefill=5 is above max_prefill=2"),
        ({"max_accelerators": 2, "decode_accelerators": 4}, "min_prefill and min_decode need 5"),
        ({"gateways": ""}, "give gateways=host:port or gateway_selector"),
        ({"routers": ""}, "routers is empty"),
        ({"prefill_deployment": "p"}, "give both prefill_deployment and decode_deployment"),
        ({"mode": "act"}, "or use mode=advise"),
        ({"model": "qwen3-8b"}, "needs model, and prefill_hardware"),
        ({"decode_hardware": "h100"}, "needs model, and prefill_hardware"),
    ],
)
def test_settings_that_contradict_each_other_name_the_remedy(fields: dict[str, object], remedy: str) -> None:
    with pytest.raises(ConfigurationError, match=remedy):
        settings(**fields)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mode", "dance"),
        ("gateways", "nowhere"),
        ("gateways", "http://a:1"),
        ("gateways", "gateway..svc:1"),
        ("routers", "a:99999"),
        ("interval_s", 0),
        ("slo_share", 1.0),
        ("min_decode", 0),
        ("lease_s", 1),
    ],
)
def test_a_value_that_cannot_be_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValidationError, match=name):
        settings(**{name: value})


def test_the_command_says_it_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(PlannerSettings, ["--gateways", "a:1", "--mode", "act"]) == 2
    assert capsys.readouterr().err.strip() == (
        "error: mode='act' needs prefill_deployment and decode_deployment; or use mode=advise"
    )


def test_the_secret_is_not_shown_and_not_empty() -> None:
    assert settings(cluster_secret="quiet quiet quiet").secret == b"quiet quiet quiet"
    assert "quiet" not in repr(settings(cluster_secret="quiet quiet quiet"))
    with pytest.raises(ConfigurationError, match="cluster_secret has 0 bytes"):
        assert settings(cluster_secret="").secret
