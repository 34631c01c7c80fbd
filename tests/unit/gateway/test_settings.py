"""Settings come from flags and variables, and nonsense is refused by name."""

import pytest
from pydantic import ValidationError
from pydantic_settings import CliApp

from tandem.core.errors import ConfigurationError
from tandem.gateway.settings import GatewaySettings


class _Read(GatewaySettings):
    """As from a command line, but it does not serve."""

    def run(self) -> int:
        return 0


def read(*arguments: str) -> GatewaySettings:
    return CliApp.run(_Read, cli_args=["--model", "m", *arguments])


def test_flags_are_read() -> None:
    settings = read("--routers", "a:1, b:2", "--port", "0", "--drain-timeout-s", "2.5", "--cluster-secret", "s" * 16)
    assert settings.router_addresses == ("a:1", "b:2")
    assert (settings.port, settings.drain_timeout_s, settings.secret) == (0, 2.5, b"s" * 16)


@pytest.mark.parametrize("key", ["", ",", " , "])
def test_an_empty_key_for_stored_responses_is_told(key: str) -> None:
    """Regression: an empty TANDEM_RESPONSES_KEY beside Redis ended the gateway with an IndexError."""
    with pytest.raises(ConfigurationError, match="responses_key is empty"):
        _ = read("--responses-key", key).responses_keys
    assert read("--responses-key", "new, old").responses_keys == (b"new", b"old")


@pytest.mark.parametrize("routers", ["", "a", "a:", ":1", "a:b", "a:1,,b:2", "a:70000"])
def test_routers_must_be_addresses(routers: str) -> None:
    with pytest.raises(ValidationError, match="routers"):
        read("--routers", routers)


def test_a_missing_secret_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TANDEM_CLUSTER_SECRET", raising=False)
    with pytest.raises(ConfigurationError, match=r"routers='a:1' needs a cluster secret.*openssl rand -hex 32"):
        _ = read("--routers", "a:1").secret


def test_an_empty_secret_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="cluster_secret"):
        _ = read("--cluster-secret", "").secret


def test_origins_are_listed_as_browsers_write_them() -> None:
    assert read().origins == read("--allowed-origins", "").origins == ()
    assert read("--allowed-origins", "https://Chat.example, http://localhost:3000").origins == (
        "https://chat.example",
        "http://localhost:3000",
    )
    assert read("--allowed-origins", "*").origins == ("*",)


@pytest.mark.parametrize("origin", ["chat.example", "https://", "https://chat.example/", "https://a/b", "null", "**"])
def test_origins_must_be_origins(origin: str) -> None:
    with pytest.raises(ValidationError, match="allowed_origins"):
        read("--allowed-origins", origin)
