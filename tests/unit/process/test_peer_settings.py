"""Plain text leaves this machine only where somebody asked for it, and a certificate must be of use at start."""

import logging
from pathlib import Path

import pytest

from tandem.core.errors import ConfigurationError
from tandem.process.peer_settings import PeerSettings
from tandem.rpc.credentials import ProcessRole
from tandem.tls.authority import Authority
from tandem.tls.identity import CertifiedRole
from tests.helpers.secret import SECRET

HERE, THERE = "127.0.0.1:7900", "10.0.0.5:7800"


def settings(**given: object) -> PeerSettings:
    return PeerSettings.model_validate(given)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    Authority("chat.default").write(tmp_path, CertifiedRole.WORKER)
    return tmp_path


@pytest.mark.parametrize("here", [HERE, "[::1]:7900", "localhost:7900"])
def test_nothing_is_needed_on_loopback(here: str, caplog: pytest.LogCaptureFixture) -> None:
    made = settings().credentials(SECRET, ProcessRole.DECODE, [here, here], address=here, incarnation="a")
    assert (made.tls, made.is_insecure, made.address, made.incarnation) == (None, False, here, "a")
    assert not caplog.records


@pytest.mark.parametrize("there", [THERE, "0.0.0.0:7900", "[::]:7900", "router:7800"])
def test_plain_text_beyond_loopback_is_refused(there: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        settings().credentials(SECRET, ProcessRole.DECODE, [HERE, there])
    words = str(refusal.value)
    assert words.startswith(f"{there} is beyond this machine")
    for remedy in ("--tls-dir (TANDEM_TLS_DIR", "tls.crt", "for a worker", "--insecure (TANDEM_INSECURE=true)"):
        assert remedy in words


def test_it_is_said_where_it_was_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    made = settings(insecure=True).credentials(SECRET, ProcessRole.GATEWAY, [HERE, THERE])
    assert made.is_insecure
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"to or from {THERE} can read and change prompts, answers and KV blocks" in record.getMessage()


def test_with_certificates_everything_is_encrypted(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = settings(tls_dir=str(directory)).credentials(SECRET, ProcessRole.PREFILL, [THERE])
    assert made.tls is not None
    assert made.tls.current().name.deployment == "chat.default"
    assert not made.is_insecure
    assert made.may_talk_with(THERE)
    assert not caplog.records


def test_a_certificate_of_another_role_is_refused(directory: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"is for a worker .*, this is a gateway"):
        settings(tls_dir=str(directory)).credentials(SECRET, ProcessRole.GATEWAY, [HERE])


def test_both_at_once_are_refused(directory: Path) -> None:
    with pytest.raises(ConfigurationError, match="exclude each other"):
        settings(tls_dir=str(directory), insecure=True).credentials(SECRET, ProcessRole.DECODE, [HERE])
