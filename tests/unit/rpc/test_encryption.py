"""Calls over TLS: both sides prove role and deployment; certificates are replaced while calls run."""

import asyncio
import socket
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tandem.core.errors import ConfigurationError, UntrustedPeerError, WorkerLostError
from tandem.rpc.client import RouterClient, WorkerClient
from tandem.rpc.credentials import Credentials, ProcessRole, certified_role
from tandem.rpc.server import serve_router, serve_worker
from tandem.tls.authority import Authority
from tandem.tls.files import CA, Material, TlsFiles
from tests.helpers.secret import AS_GATEWAY, AS_WORKER, SECRET
from tests.helpers.wire_tap import tapping
from tests.unit.rpc.handlers import STATUS, Router, Worker, after_restart, generate_call

ANY_PORT = "127.0.0.1:0"
DEPLOYMENT = "chat.default"


@dataclass
class Place:
    """Source of certificates for the processes of a test."""

    directory: Path
    authority: Authority

    def credentials(
        self, role: ProcessRole, *, authority: Authority | None = None, certified: ProcessRole | None = None
    ) -> Credentials:
        """`certified`: the role in the certificate, if not the one that is claimed."""
        owner = certified_role(certified or role)
        directory = self.directory / f"{role}-{len(list(self.directory.iterdir()))}"
        (authority or self.authority).write(directory, owner)
        return Credentials(SECRET, role, tls=TlsFiles(directory, owner))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path, Authority(DEPLOYMENT))


def run(check: Callable[[], Coroutine[object, object, None]]) -> None:
    asyncio.run(asyncio.wait_for(check(), 30))


async def ask_status(address: str, credentials: Credentials) -> None:
    client = WorkerClient(address, credentials)
    try:
        assert await client.status() == STATUS
    finally:
        await client.close()


def test_calls_and_streams(place: Place) -> None:
    async def check() -> None:
        server = await serve_worker(Worker(), ANY_PORT, place.credentials(ProcessRole.DECODE))
        client = WorkerClient(server.address, place.credentials(ProcessRole.GATEWAY))
        assert await client.status() == STATUS
        for stream in (client.serve(generate_call()), client.generate(generate_call())):
            async with aclosing(stream):
                assert [token async for update in stream for token in update.output.token_ids] == [0, 1, 2]
        await client.close()
        await server.stop()

    run(check)


def test_nothing_that_is_said_can_be_read(place: Place) -> None:
    """A prompt and the names of methods are in clear without certificates, and not with them."""

    async def heard(server_side: Credentials, client_side: Credentials) -> bytes:
        server = await serve_worker(Worker(), ANY_PORT, server_side)
        async with tapping(server.address) as tap:
            client = WorkerClient(tap.address, client_side)
            async with aclosing(client.generate(replace(generate_call(), request_id="a telling name"))) as stream:
                assert len([update async for update in stream]) == 3
            await client.close()
        await server.stop()
        return tap.everything

    async def check() -> None:
        assert b"a telling name" in await heard(AS_WORKER, AS_GATEWAY)
        encrypted = await heard(place.credentials(ProcessRole.DECODE), place.credentials(ProcessRole.GATEWAY))
        assert b"a telling name" not in encrypted
        assert b"tandem" not in encrypted.replace(b"worker.chat.default.tandem.internal", b"")

    run(check)


def test_a_server_with_the_certificate_of_another_role_is_told_nothing(place: Place) -> None:
    """It knows the cluster's secret and claims the role that is expected."""

    async def check() -> None:
        worker = Worker()
        server = await serve_worker(
            worker, ANY_PORT, place.credentials(ProcessRole.DECODE, certified=ProcessRole.GATEWAY)
        )
        with pytest.raises(UntrustedPeerError, match=r"TLS with .* failed: .*Hostname.*certificates of its own role"):
            await ask_status(server.address, place.credentials(ProcessRole.GATEWAY))
        assert worker.calls == []
        await server.stop()

    run(check)


def test_a_worker_is_no_router(place: Place) -> None:
    async def check() -> None:
        router = Router()
        server = await serve_router(router, ANY_PORT, place.credentials(ProcessRole.ROUTER, certified=ProcessRole.BOTH))
        client = RouterClient(server.address, place.credentials(ProcessRole.GATEWAY))
        with pytest.raises(UntrustedPeerError, match="TLS with"):
            await client.models()
        assert router.calls == []
        await client.close()
        await server.stop()

    run(check)


@pytest.mark.parametrize("claimed", [ProcessRole.GATEWAY, ProcessRole.OPERATOR, ProcessRole.ROUTER])
def test_a_client_is_no_more_than_its_certificate_says(claimed: ProcessRole, place: Place) -> None:
    """A worker that was taken over knows the cluster's secret, so it could claim every role."""

    async def check() -> None:
        worker = Worker()
        server = await serve_worker(worker, ANY_PORT, place.credentials(ProcessRole.DECODE))
        with pytest.raises(UntrustedPeerError, match=r"its log says why; .* a certificate of its own role"):
            await ask_status(server.address, place.credentials(claimed, certified=ProcessRole.DECODE))
        assert worker.calls == []
        await server.stop()

    run(check)


def test_a_deployment_that_trusts_the_same_authority_is_a_stranger(place: Place) -> None:
    async def check() -> None:
        server = await serve_worker(Worker(), ANY_PORT, place.credentials(ProcessRole.DECODE))
        with pytest.raises(UntrustedPeerError, match="TLS with"):
            await ask_status(server.address, _signed_for_another(place))
        await server.stop()

    run(check)


def _signed_for_another(place: Place) -> Credentials:
    directory = place.directory / "another"
    place.authority.write_named(directory, "gateway.chat.staging.tandem.internal")
    return Credentials(SECRET, ProcessRole.GATEWAY, tls=TlsFiles(directory, certified_role("gateway")))


def test_a_client_of_another_deployment_is_refused_by_the_server_too(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that does not look at whom it calls."""

    async def check() -> None:
        server = await serve_worker(Worker(), ANY_PORT, place.credentials(ProcessRole.DECODE))
        stranger = _signed_for_another(place)
        assert stranger.tls is not None
        material = replace(stranger.tls.current())
        monkeypatch.setattr(type(material), "peer_name", lambda *_: f"worker.{DEPLOYMENT}.tandem.internal")
        with pytest.raises(UntrustedPeerError, match=r"its log says why; .* and deployment"):
            await ask_status(server.address, stranger)
        await server.stop()

    run(check)


def test_authorities_that_differ(place: Place) -> None:
    async def check() -> None:
        server = await serve_worker(Worker(), ANY_PORT, place.credentials(ProcessRole.DECODE))
        with pytest.raises(UntrustedPeerError, match=r"TLS with .*CERTIFICATE_VERIFY_FAILED"):
            await ask_status(server.address, place.credentials(ProcessRole.GATEWAY, authority=Authority(DEPLOYMENT)))
        await server.stop()

    run(check)


def test_only_one_side_uses_tls(place: Place) -> None:
    """Neither looks like a worker that died: what is wrong is said."""

    async def check() -> None:
        plain = await serve_worker(Worker(), ANY_PORT, AS_WORKER)
        with pytest.raises(UntrustedPeerError, match=r"TLS with .* failed: .*WRONG_VERSION"):
            await ask_status(plain.address, place.credentials(ProcessRole.GATEWAY))
        await plain.stop()
        encrypted = await serve_worker(Worker(), ANY_PORT, place.credentials(ProcessRole.DECODE))
        with pytest.raises(WorkerLostError, match=r"closed .* while .* made. .*only one of the two uses TLS"):
            await ask_status(encrypted.address, AS_GATEWAY)
        await encrypted.stop()

    run(check)


def test_plain_text_stays_on_this_machine() -> None:
    """Unless it was asked for. Nothing is connected to: the address is of nobody."""

    async def check() -> None:
        client = WorkerClient("192.0.2.1:7900", AS_GATEWAY)
        with pytest.raises(UntrustedPeerError, match=r"192.0.2.1:7900 is beyond this machine, .*--tls-dir.*--insecure"):
            await client.status()
        await client.close()
        client = WorkerClient("192.0.2.1:7900", replace(AS_GATEWAY, is_insecure=True))
        with pytest.raises(WorkerLostError):
            await client.status(timeout_s=0.1)
        await client.close()

    run(check)


class _Fleet:
    """Servers and clients that are called all the time while certificates change."""

    def __init__(self, place: Place, old: Authority) -> None:
        self.server_dir, self.client_dir = place.directory / "server", place.directory / "client"
        self.issue(old, old.certificate)
        self.server_files = TlsFiles(self.server_dir, certified_role("decode"))
        self.as_worker = Credentials(SECRET, ProcessRole.DECODE, tls=self.server_files)
        client_files = TlsFiles(self.client_dir, certified_role("gateway"))
        self.as_gateway = Credentials(SECRET, ProcessRole.GATEWAY, tls=client_files)

    def trust(self, ca: bytes) -> None:
        for directory in (self.server_dir, self.client_dir):
            new = directory / "new"
            new.write_bytes(ca)
            new.rename(directory / CA)

    def issue(self, authority: Authority, ca: bytes) -> None:
        authority.write(self.server_dir, certified_role("decode"))
        authority.write(self.client_dir, certified_role("gateway"))
        self.trust(ca)


def test_an_authority_is_replaced_while_calls_run(place: Place) -> None:
    """Both CAs are trusted, then certificates are renewed, then the old CA is forgotten: no call fails, on connections
    that live on nor on those that break. An old certificate is refused from then on.
    """

    async def check() -> None:
        old, new = place.authority, Authority(DEPLOYMENT)
        fleet = _Fleet(place, old)
        former = place.credentials(ProcessRole.GATEWAY)
        assert former.tls is not None
        server = await serve_worker(Worker(num_before_silence=1), ANY_PORT, fleet.as_worker)
        client = WorkerClient(server.address, fleet.as_gateway)
        await ask_status(server.address, former)
        long_stream = client.generate(generate_call())
        await anext(long_stream)
        num_done = 0

        async def keep_asking() -> None:
            nonlocal num_done
            while True:
                await client.status()
                await ask_status(server.address, fleet.as_gateway)
                num_done += 1

        asking = asyncio.create_task(keep_asking())

        async def some_calls() -> None:
            wanted = num_done + 3
            while num_done < wanted:
                assert not asking.done(), asking.exception()
                await asyncio.sleep(0)

        await some_calls()
        both = old.certificate + new.certificate
        steps: list[Callable[[], None]] = [
            lambda: fleet.trust(both),
            lambda: fleet.issue(new, both),
            lambda: fleet.trust(new.certificate),
        ]
        for step in steps:
            before = fleet.server_files.current()
            step()
            assert fleet.server_files.current() is not before
            await some_calls()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        # At the same port: the connection of `client` breaks, and it must make one with its new certificate.
        await long_stream.aclose()
        await server.stop()
        server = await serve_worker(Worker(), server.address, fleet.as_worker)
        assert await after_restart(client.status) == STATUS
        former = replace(former, tls=_FilesThatStay(former.tls, new.certificate))
        with pytest.raises(WorkerLostError, match=r"may not accept this process's certificate"):
            await ask_status(server.address, former)
        await client.close()
        await server.stop()

    run(check)


class _FilesThatStay(TlsFiles):
    """An old certificate in the hands of somebody who trusts the new CA."""

    def __init__(self, files: TlsFiles, ca: bytes) -> None:
        self._kept = replace(files.current(), ca=ca)

    def current(self) -> Material:
        return self._kept


def test_a_port_that_is_taken(place: Place) -> None:
    async def check() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            bind = f"127.0.0.1:{taken.getsockname()[1]}"
            with pytest.raises(ConfigurationError, match="cannot listen"):
                await serve_worker(Worker(), bind, place.credentials(ProcessRole.DECODE))

    run(check)
