"""Certificates from a directory: refused at start when they are of no use, replaced while the process runs."""

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from tandem.core.errors import ConfigurationError
from tandem.tls.authority import Authority
from tandem.tls.files import CA, CERTIFICATE, KEY, TlsFiles
from tandem.tls.identity import CertifiedName, CertifiedRole

WORKER, ROUTER = CertifiedRole.WORKER, CertifiedRole.ROUTER
OURS = Authority("chat.default")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    OURS.write(tmp_path / "tls", WORKER)
    return tmp_path / "tls"


def test_what_is_read(directory: Path) -> None:
    material = TlsFiles(directory, WORKER).current()
    assert material.name == CertifiedName(WORKER, "chat.default")
    assert material.peer_name(ROUTER) == "router.chat.default.tandem.internal"
    assert material.key == (directory / KEY).read_bytes()
    assert "PRIVATE KEY" not in repr(material)


def test_only_this_user_reads_the_key(directory: Path) -> None:
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (directory / KEY).stat().st_mode & 0o777 == 0o600


def _other_ca(directory: Path) -> None:
    (directory / CA).write_bytes(Authority("chat.default").certificate)


def _other_key(directory: Path) -> None:
    certificate = (directory / CERTIFICATE).read_bytes()
    OURS.write(directory, WORKER)
    (directory / CERTIFICATE).write_bytes(certificate)


def _other_role(directory: Path) -> None:
    OURS.write(directory, ROUTER)


def _no_name(directory: Path) -> None:
    OURS.write_named(directory, "worker.example.com")


def _expired(directory: Path) -> None:
    Authority("chat.default", timedelta(minutes=-1)).write(directory, WORKER)


def _writing(name: str, data: bytes) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        (directory / name).write_bytes(data)

    return damage


def _without(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


UNUSABLE = {
    "another CA": (_other_ca, rf"{CERTIFICATE} cannot be used: .*issuer certificate; it must be signed by a CA in"),
    "another key": (_other_key, rf"{KEY} does not belong to {CERTIFICATE}"),
    "another role": (_other_role, r"is for a router \(router.chat.default.*this is a worker: worker.DEPLOYMENT"),
    "no name": (_no_name, r"DNS names are worker.example.com; one must be worker.DEPLOYMENT.tandem.internal"),
    "expired": (_expired, r"is valid from .* which is not now; renew it"),
    "no certificate": (_without(CERTIFICATE), rf"{CERTIFICATE} cannot be read \(No such file.*tls_dir needs"),
    "no key": (_without(KEY), rf"{KEY} cannot be read \(No such file"),
    "no CA": (_without(CA), rf"{CA} cannot be read \(No such file"),
    "an empty certificate": (_writing(CERTIFICATE, b""), rf"{CERTIFICATE} has no certificates in PEM form"),
    "an empty CA": (_writing(CA, b""), rf"{CA} has no certificates in PEM form"),
    "a key that is none": (_writing(KEY, b"x"), rf"{KEY} is no private key in PEM form"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_what_is_of_no_use_is_refused_at_start(case: str, directory: Path) -> None:
    damage, words = UNUSABLE[case]
    damage(directory)
    with pytest.raises(ConfigurationError, match=words):
        TlsFiles(directory, WORKER)


def test_a_certificate_of_the_future_is_refused(directory: Path) -> None:
    with pytest.raises(ConfigurationError, match="set this machine's clock"):
        TlsFiles(directory, WORKER, now_s=lambda: 0.0)


@contextlib.contextmanager
def not_root() -> Iterator[None]:
    """Root reads every file, so the process is nobody meanwhile."""
    user_id = os.geteuid()
    if user_id == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user_id)


def test_a_key_that_may_not_be_read_is_refused() -> None:
    with tempfile.TemporaryDirectory() as made:  # NOTE: nobody may not enter directories of pytest's
        directory = Path(made)
        OURS.write(directory, WORKER)
        directory.chmod(0o755)
        (directory / KEY).chmod(0)
        with (
            not_root(),
            pytest.raises(ConfigurationError, match=rf"Permission denied.*{KEY}.*readable by this process"),
        ):
            TlsFiles(directory, WORKER)


def test_files_that_stay_are_read_once(directory: Path) -> None:
    files = TlsFiles(directory, WORKER)
    assert files.current() is files.current()


def test_new_files_are_in_use_at_once(directory: Path) -> None:
    files = TlsFiles(directory, WORKER)
    before = files.current()
    Authority("chat.default").write(directory, WORKER)
    after = files.current()
    assert after.certificate == (directory / CERTIFICATE).read_bytes() != before.certificate
    assert after.ca != before.ca


@pytest.mark.parametrize("case", UNUSABLE)
def test_new_files_that_are_of_no_use_change_nothing(
    case: str, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line tells it, however often the files are asked for; sound ones are used again."""
    files = TlsFiles(directory, WORKER)
    before = files.current()
    UNUSABLE[case][0](directory)
    with caplog.at_level(logging.WARNING):
        assert [files.current() for _ in range(5)] == [before] * 5
    assert len(caplog.records) == 1
    assert "read before stay in use" in caplog.text
    OURS.write(directory, WORKER)
    assert files.current() is not before


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_comments_beside_certificates_do_not_matter(encoding: str, directory: Path) -> None:
    """`ssl` reads text as ASCII: such a comment ended the process."""
    ca = directory / "ca.crt"
    ca.write_bytes("# Főtanúsítvány\n".replace("ő", "ö").encode(encoding) + ca.read_bytes())
    assert TlsFiles(directory, WORKER).current().name.role is WORKER


def test_a_directory_that_is_replaced_by_a_link(tmp_path: Path) -> None:
    """As the kubelet replaces the files of a Secret."""
    OURS.write(tmp_path / "1", WORKER)
    Authority("chat.default").write(tmp_path / "2", WORKER)
    data, directory = tmp_path / "..data", tmp_path / "mounted"
    data.symlink_to("1")
    directory.mkdir()
    for name in (CERTIFICATE, KEY, CA):
        (directory / name).symlink_to(data / name)
    files = TlsFiles(directory, WORKER)
    (tmp_path / "new").symlink_to("2")
    (tmp_path / "new").rename(data)
    assert files.current().certificate == (tmp_path / "2" / CERTIFICATE).read_bytes()
