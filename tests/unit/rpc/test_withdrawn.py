"""Callers whose authority was withdrawn: cut off on connections that exist, while those of others live on."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from tandem.core.errors import TandemError, UntrustedPeerError, WorkerLostError
from tandem.rpc import caller_watch, grpc_connection
from tandem.rpc.client import WorkerClient
from tandem.rpc.credentials import Credentials, ProcessRole, certified_role
from tandem.rpc.messages import GenerateUpdate
from tandem.rpc.server import serve_worker
from tandem.tls.authority import VALID_FOR, Authority
from tandem.tls.files import CA, CERTIFICATE, KEY, TlsFiles
from tandem.tls.identity import CertifiedRole
from tandem.tls.peers import PeerCertificate
from tests.helpers.secret import SECRET
from tests.unit.rpc.handlers import STATUS, Worker, generate_call

DEPLOYMENT = "chat.default"
OURS, THEIRS = Authority(DEPLOYMENT), Authority(DEPLOYMENT)
BOTH = OURS.certificate + THEIRS.certificate
ALL_TOKENS = [0, 1, 2]

Start = Callable[[WorkerClient], AsyncGenerator[GenerateUpdate, None]]


def credentials(directory: Path, role: ProcessRole, authority: Authority) -> Credentials:
    authority.write(directory, certified_role(role), ca=BOTH)
    return Credentials(SECRET, role, tls=TlsFiles(directory, certified_role(role)))


@pytest.mark.parametrize(
    "start",
    [lambda client: client.generate(generate_call()), lambda client: client.serve(generate_call())],
    ids=["a call of its own", "a shared stream"],
)
def test_a_withdrawn_caller_is_cut_off(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caller_watch, "CHECK_INTERVAL_S", 0.05)
    go_on = asyncio.Event()

    class HalfWay(Worker):
        async def generate(self, call: object) -> AsyncGenerator[GenerateUpdate, None]:
            async for update in super().generate(call):  # type: ignore[arg-type]
                yield update
                await go_on.wait()

    async def check() -> None:
        as_worker = credentials(tmp_path / "server", ProcessRole.DECODE, OURS)
        server = await serve_worker(HalfWay(), "127.0.0.1:0", as_worker)
        kept = WorkerClient(server.address, credentials(tmp_path / "kept", ProcessRole.GATEWAY, OURS))
        gone = WorkerClient(server.address, credentials(tmp_path / "gone", ProcessRole.GATEWAY, THEIRS))
        streams = [start(client) for client in (kept, gone)]
        tokens = [list((await anext(stream)).output.token_ids) for stream in streams]
        assert [await client.status() for client in (kept, gone)] == [STATUS, STATUS]
        OURS.write(tmp_path / "server", CertifiedRole.WORKER)
        with pytest.raises(TandemError, match="is not accepted any more"):
            await anext(streams[1])
        with pytest.raises(UntrustedPeerError):
            await gone.status()
        go_on.set()
        async for update in streams[0]:
            tokens[0] += update.output.token_ids
        assert tokens[0] == ALL_TOKENS
        assert await kept.status() == STATUS
        for client in (kept, gone):
            await client.close()
        await server.stop()

    run(check)


def run(check: Callable[[], Coroutine[object, object, None]]) -> None:
    asyncio.run(asyncio.wait_for(check(), 30))


def test_a_caller_with_an_intermediate_authority(tmp_path: Path) -> None:
    """Its chain leads to the root that is trusted, also when it is looked at again, until the root goes."""

    async def check() -> None:
        as_worker = credentials(tmp_path / "server", ProcessRole.DECODE, OURS)
        root, issuer = make_chain(tmp_path / "client")
        trust(tmp_path / "server", OURS.certificate + root)
        server = await serve_worker(Worker(), "127.0.0.1:0", as_worker)
        files = TlsFiles(tmp_path / "client", CertifiedRole.GATEWAY)
        client = WorkerClient(server.address, Credentials(SECRET, ProcessRole.GATEWAY, tls=files))
        assert await client.status() == STATUS
        assert as_worker.tls is not None
        chain = x509.load_pem_x509_certificates(files.current().certificate)
        peer = PeerCertificate(as_worker.tls, chain)
        assert peer.is_accepted()
        trust(tmp_path / "server", OURS.certificate + issuer)
        assert peer.is_accepted()
        trust(tmp_path / "server", OURS.certificate)
        assert not peer.is_accepted()
        await client.close()
        await server.stop()

    run(check)


def trust(directory: Path, ca: bytes) -> None:
    (directory / "new").write_bytes(ca)
    (directory / "new").rename(directory / CA)


def make_chain(directory: Path) -> tuple[bytes, bytes]:
    """Writes the files of a gateway, which an intermediate authority has signed; returns the root and that one."""
    root_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    root, issuer, leaf = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, each)]) for each in ("r", "i", "l"))
    own_key = ec.generate_private_key(ec.SECP256R1())
    made = [
        _certificate(root, root, root_key, root_key, x509.BasicConstraints(ca=True, path_length=1)),
        _certificate(issuer, root, key, root_key, x509.BasicConstraints(ca=True, path_length=0)),
        _certificate(leaf, issuer, own_key, key, x509.BasicConstraints(ca=False, path_length=None)),
    ]
    directory.mkdir()
    (directory / CERTIFICATE).write_bytes(made[2] + made[1])
    (directory / KEY).write_bytes(own_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (directory / CA).write_bytes(OURS.certificate + made[0])
    return made[0], made[1]


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signs: ec.EllipticCurvePrivateKey,
    constraints: x509.BasicConstraints,
) -> bytes:
    now = datetime.now(UTC)
    names = [x509.DNSName("gateway.chat.default.tandem.internal")]
    built = (
        x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(constraints, critical=True)
    )
    if not constraints.ca:
        built = built.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return built.sign(signs, hashes.SHA256()).public_bytes(Encoding.PEM)


def test_a_certificate_that_has_ended_is_not_accepted_any_more(tmp_path: Path) -> None:
    as_worker = credentials(tmp_path / "server", ProcessRole.DECODE, OURS)
    assert as_worker.tls is not None
    chain = x509.load_pem_x509_certificates(as_worker.tls.current().certificate)
    now_s = time.time()
    peer = PeerCertificate(as_worker.tls, chain, lambda: now_s)
    assert peer.is_accepted()
    now_s += VALID_FOR.total_seconds() + 1
    assert not peer.is_accepted()


def test_a_client_leaves_a_withdrawn_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that makes no further call: it looks at its files while a stream runs."""
    monkeypatch.setattr(grpc_connection, "CHECK_INTERVAL_S", 0.05)
    monkeypatch.setattr(grpc_connection, "FORMER_CERTIFICATES_S", 0.1)

    async def check() -> None:
        as_worker = credentials(tmp_path / "server", ProcessRole.DECODE, THEIRS)
        server = await serve_worker(Worker(num_before_silence=1), "127.0.0.1:0", as_worker)
        client = WorkerClient(server.address, credentials(tmp_path / "client", ProcessRole.GATEWAY, OURS))
        stream = client.generate(generate_call())
        assert list((await anext(stream)).output.token_ids) == [0]
        trust(tmp_path / "client", OURS.certificate)
        with pytest.raises(WorkerLostError):
            await anext(stream)
        with pytest.raises(UntrustedPeerError):
            await client.status()
        await client.close()
        await server.stop()

    run(check)
