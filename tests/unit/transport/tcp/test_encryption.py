"""KV blocks over TLS: read by workers of the same deployment only, and by nobody on the way."""

import logging
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.core.errors import ConfigurationError, IncompatiblePeerError, TransportError
from tandem.tls.authority import Authority
from tandem.tls.contexts import server_context
from tandem.tls.files import CA, CERTIFICATE, KEY, Material, TlsFiles
from tandem.tls.identity import CertifiedRole
from tandem.transport.base import Peer
from tandem.transport.card import Identity
from tandem.transport.tcp import client as tcp_client
from tandem.transport.tcp import server as tcp_server
from tandem.transport.tcp.transport import TcpConfig, TcpTransport
from tests.helpers.secret import SECRET
from tests.helpers.transport_pools import COMPATIBILITY, pool_of, seeded_pages

NUM_BLOCKS, PAGE_BYTES = 16, 65536
OURS = Authority("chat.default")
BLOCKS = list(range(1, NUM_BLOCKS))


def certificates(
    directory: Path, authority: Authority = OURS, role: CertifiedRole = CertifiedRole.WORKER, dns: str | None = None
) -> TlsFiles:
    place = directory / str(len(list(directory.iterdir())))
    if dns is None:
        authority.write(place, role)
    else:
        authority.write_named(place, dns)
    return TlsFiles(place, role)


@contextmanager
def transport(tls: TlsFiles | None, seed: int = 1) -> Iterator[TcpTransport]:
    pages = seeded_pages(seed, NUM_BLOCKS, PAGE_BYTES)
    made = TcpTransport(pool_of(pages), Identity(COMPATIBILITY, SECRET), TcpConfig(tls=tls))
    yield made
    made.close()


def stranger_of(source: TcpTransport) -> socket.socket:
    return socket.create_connection((source.address.host, source.address.port), timeout=10)


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def can_read(source: TcpTransport, reader: TcpTransport) -> bool:
    transfer = reader.read(reader.connect(source.card()), BLOCKS, BLOCKS)
    assert transfer.wait(10.0)
    return transfer.error is None


def test_workers_of_a_deployment_read_each_other(tmp_path: Path) -> None:
    with transport(certificates(tmp_path)) as source, transport(certificates(tmp_path), 2) as reader:
        assert can_read(source, reader)


@pytest.mark.parametrize("role", [CertifiedRole.ROUTER, CertifiedRole.GATEWAY])
def test_a_client_of_another_role_is_refused(
    role: CertifiedRole, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It knows the cluster's secret and has the card. It is cut off after its TLS handshake, so it hears no reason."""
    with transport(certificates(tmp_path)) as source, transport(certificates(tmp_path, role=role), 2) as reader:
        with caplog.at_level(logging.WARNING), pytest.raises(TransportError):
            reader.connect(source.card())
        assert f"is for {role}.chat.default.tandem.internal; worker.chat.default" in caplog.text


@pytest.mark.parametrize("name", ["gateway.chat.default.tandem.internal", "worker.chat.staging.tandem.internal"])
def test_a_server_that_is_no_worker_of_this_deployment_is_refused(name: str, tmp_path: Path) -> None:
    role = CertifiedRole(name.partition(".")[0])
    with (
        transport(certificates(tmp_path, role=role, dns=name)) as source,
        transport(certificates(tmp_path), 2) as reader,
        pytest.raises(TransportError, match=r"Hostname mismatch.*certificates of the same CA"),
    ):
        reader.connect(source.card())


def test_a_wildcard_is_no_worker(tmp_path: Path) -> None:
    """A client's library accepts it for every role."""
    files = certificates(tmp_path)
    OURS.write_named(tmp_path / "wild", "*.chat.default.tandem.internal")
    with pytest.raises(ConfigurationError, match="names no process of Tandem"):
        TlsFiles(tmp_path / "wild", CertifiedRole.WORKER)
    wild = _Unchecked(tmp_path / "wild", files)
    with (
        transport(wild) as source,
        transport(files, 2) as reader,
        pytest.raises(IncompatiblePeerError, match=r"is for \*.chat.default"),
    ):
        reader.connect(source.card())


class _Unchecked(TlsFiles):
    """Presents a certificate that this process would not start with."""

    def __init__(self, directory: Path, sound: TlsFiles) -> None:
        ca = ssl.PEM_cert_to_DER_cert(sound.current().ca.decode())
        server = server_context(directory / CERTIFICATE, directory / KEY, ca)
        self._presented = replace(sound.current(), server=server)

    def current(self) -> Material:
        return self._presented


def test_authorities_that_differ(tmp_path: Path) -> None:
    other = certificates(tmp_path, Authority("chat.default"))
    with (
        transport(certificates(tmp_path)) as source,
        transport(other, 2) as reader,
        pytest.raises(TransportError, match=r"certificate verify failed.*certificates of the same CA"),
    ):
        reader.connect(source.card())


def test_a_reader_without_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_server, "HANDSHAKE_S", 0.2)
    with (
        transport(certificates(tmp_path)) as source,
        transport(None, 2) as reader,
        pytest.raises(TransportError, match=r"closed the connection|broke off"),
    ):
        reader.connect(source.card())


def test_a_source_without_tls(tmp_path: Path) -> None:
    with (
        transport(None) as source,
        transport(certificates(tmp_path), 2) as reader,
        pytest.raises(TransportError, match=r"broke off: .*WRONG_VERSION.*give every process"),
    ):
        reader.connect(source.card())


def test_a_stranger_who_says_nothing_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_server, "HANDSHAKE_S", 0.2)
    with transport(certificates(tmp_path)) as source, stranger_of(source) as stranger:
        assert is_closed(stranger)


def test_closing_while_a_stranger_says_nothing(tmp_path: Path) -> None:
    """It ends the connection instead of waiting for the handshake."""
    with transport(certificates(tmp_path)) as source:
        stranger = stranger_of(source)
    with stranger:
        assert is_closed(stranger)


def test_an_authority_is_replaced_while_blocks_are_read(tmp_path: Path) -> None:
    """No read fails: connections live on, and new ones use what is in the files by then."""
    new, source_dir, reader_dir = Authority("chat.default"), tmp_path / "source", tmp_path / "reader"

    def issue(authority: Authority, ca: bytes) -> None:
        for directory in (source_dir, reader_dir):
            authority.write(directory, CertifiedRole.WORKER)
            (directory / CA).write_bytes(ca)

    issue(OURS, OURS.certificate)
    files = TlsFiles(source_dir, CertifiedRole.WORKER), TlsFiles(reader_dir, CertifiedRole.WORKER)
    with transport(files[0]) as source, transport(files[1], 2) as reader, transport(certificates(tmp_path), 3) as old:
        peer = reader.connect(source.card())
        both = OURS.certificate + new.certificate
        for authority, ca in ((OURS, both), (new, both), (new, new.certificate)):
            issue(authority, ca)
            transfer = reader.read(peer, BLOCKS, BLOCKS)
            assert transfer.wait(10.0)
            assert transfer.error is None
            with transport(files[1], 4) as late:
                assert can_read(source, late)
        with pytest.raises(TransportError, match="verify failed"):
            old.connect(source.card())


def test_bytes_of_a_connection_that_is_shut_down_are_not_taken_for_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`SSLSocket.shutdown` drops the TLS state, after which a read goes on in clear: the pool was given ciphertext."""
    connections: list[socket.socket] = []
    opened = tcp_client._encrypted

    def remember(*given: object) -> socket.socket:
        connections.append(opened(*given))  # type: ignore[arg-type]
        return connections[-1]

    monkeypatch.setattr(tcp_client, "_encrypted", remember)
    with transport(certificates(tmp_path)) as source, transport(certificates(tmp_path), 2) as reader:
        reader.connect(source.card())
        (connection,) = connections
        connection.shutdown(socket.SHUT_RDWR)
        assert connection.version() == "TLSv1.3"  # type: ignore[attr-defined]


def test_a_withdrawn_reader_reads_nothing_more(tmp_path: Path) -> None:
    """Over the connection that it has; one whose authority is still trusted goes on over its own."""
    others = Authority("chat.default")
    source_dir = tmp_path / "source"
    OURS.write(source_dir, CertifiedRole.WORKER, ca=OURS.certificate + others.certificate)
    trusting = OURS.certificate + others.certificate
    withdrawn_dir = tmp_path / "withdrawn"
    others.write(withdrawn_dir, CertifiedRole.WORKER, ca=trusting)
    worker = CertifiedRole.WORKER
    with (
        transport(TlsFiles(source_dir, worker)) as source,
        transport(certificates(tmp_path), 2) as reader,
        transport(TlsFiles(withdrawn_dir, worker), 3) as withdrawn,
    ):
        peers = [(each, each.connect(source.card())) for each in (reader, withdrawn)]
        assert [read_over(*each) for each in peers] == ["", ""]
        OURS.write(source_dir, worker)
        said = [read_over(*each) for each in peers]
        assert said[0] == ""
        assert "is not accepted any more" in said[1]
        assert "verify failed" in read_over(*peers[1]) or "alert" in read_over(*peers[1])


def test_nothing_is_read_from_a_withdrawn_source(tmp_path: Path) -> None:
    others = Authority("chat.default")
    reader_dir = tmp_path / "reader"
    OURS.write(reader_dir, CertifiedRole.WORKER, ca=OURS.certificate + others.certificate)
    others.write(tmp_path / "source", CertifiedRole.WORKER, ca=OURS.certificate + others.certificate)
    files = [TlsFiles(each, CertifiedRole.WORKER) for each in (tmp_path / "source", reader_dir)]
    with transport(files[0]) as source, transport(files[1], 2) as reader:
        peer = reader.connect(source.card())
        assert read_over(reader, peer) == ""
        OURS.write(reader_dir, CertifiedRole.WORKER)
        assert "verify failed" in read_over(reader, peer)


def test_a_connection_made_while_certificates_are_replaced_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: what replaced them counted as what the connection was made with, which stayed, although withdrawn."""
    others = Authority("chat.default")
    reader_dir = tmp_path / "reader"
    OURS.write(reader_dir, CertifiedRole.WORKER, ca=OURS.certificate + others.certificate)
    others.write(tmp_path / "source", CertifiedRole.WORKER, ca=OURS.certificate + others.certificate)
    files = [TlsFiles(each, CertifiedRole.WORKER) for each in (tmp_path / "source", reader_dir)]
    opened = tcp_client._encrypted

    def withdraw(*given: object) -> socket.socket:
        connection = opened(*given)  # type: ignore[arg-type]
        OURS.write(reader_dir, CertifiedRole.WORKER)
        return connection

    monkeypatch.setattr(tcp_client, "_encrypted", withdraw)
    with transport(files[0]) as source, transport(files[1], 2) as reader:
        assert "verify failed" in read_over(reader, reader.connect(source.card()))


def read_over(reader: TcpTransport, peer: Peer) -> str:
    """Error of a read over the existing link; "" = it did not fail."""
    transfer = reader.read(peer, BLOCKS, BLOCKS)
    assert transfer.wait(10.0)
    return "" if transfer.error is None else str(transfer.error)
