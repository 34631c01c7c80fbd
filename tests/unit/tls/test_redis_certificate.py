"""Certificate of compose's Redis: drawn once, kept while it can be used, its key beside no client."""

import time
from pathlib import Path

import pytest
from cryptography import x509

from tandem.tls.authority import Authority
from tandem.tls.files import CA, CERTIFICATE, KEY
from tandem.tls.peers import is_signed
from tandem.tls.redis_certificate import VALID_FOR, create_certificate, main


def _certificate(directory: Path) -> bytes:
    return (directory / CERTIFICATE).read_bytes()


def _are_equal(server: Path, clients: Path) -> bool:
    """Whether clients accept the server's certificate."""
    (leaf,) = x509.load_pem_x509_certificates(_certificate(server))
    return is_signed([leaf], x509.load_pem_x509_certificates((clients / CA).read_bytes()))


def test_it_has_the_name_and_clients_get_the_authority_alone(tmp_path: Path) -> None:
    server, clients = tmp_path / "server", tmp_path / "clients"
    assert main(["redis", str(server), str(clients)]) == 0
    (leaf,) = x509.load_pem_x509_certificates(_certificate(server))
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["redis"]
    assert [path.name for path in clients.iterdir()] == [CA]
    assert _are_equal(server, clients)
    assert all((server / name).stat().st_mode & 0o777 == 0o644 for name in (CA, KEY, CERTIFICATE))


def test_it_stays_at_the_next_start(tmp_path: Path) -> None:
    server, clients = tmp_path / "server", tmp_path / "clients"
    create_certificate("redis", server, clients)
    before = _certificate(server)
    (clients / CA).unlink()
    create_certificate("redis", server, clients)
    assert _certificate(server) == before
    assert _are_equal(server, clients), "the authority is handed on again"


@pytest.mark.parametrize("damage", ["no certificate", "half a certificate", "another authority", "no authority"])
def test_what_cannot_be_used_is_drawn_anew(damage: str, tmp_path: Path) -> None:
    """As after an end in the middle of the drawing."""
    server, clients = tmp_path / "server", tmp_path / "clients"
    create_certificate("redis", server, clients)
    before = _certificate(server)
    match damage:
        case "no certificate":
            (server / CERTIFICATE).unlink()
        case "half a certificate":
            (server / CERTIFICATE).write_bytes(before[: len(before) // 2])
        case "another authority":
            (server / CA).write_bytes(Authority("redis").certificate)
        case _:
            (server / CA).unlink()
    create_certificate("redis", server, clients)
    assert _certificate(server) != before
    assert _are_equal(server, clients)


def test_one_that_has_ended_is_drawn_anew(tmp_path: Path) -> None:
    server, clients = tmp_path / "server", tmp_path / "clients"
    create_certificate("redis", server, clients)
    before, day_s = _certificate(server), 86400.0
    create_certificate("redis", server, clients, lambda: time.time() + VALID_FOR.total_seconds() - day_s)
    assert _certificate(server) == before
    create_certificate("redis", server, clients, lambda: time.time() + VALID_FOR.total_seconds() + day_s)
    assert _certificate(server) != before


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["redis", str(tmp_path / "file" / "server"), str(tmp_path / "clients")]) == 1
    assert "file/server" in capsys.readouterr().err
