"""Certificates that `tandem up` makes are renewed in time, and no process refuses another in between."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest

from tandem.tls import renewal
from tandem.tls.authority import Authority
from tandem.tls.contexts import check_by_handshake
from tandem.tls.files import CA, CERTIFICATE, Material, TlsFiles
from tandem.tls.identity import CertifiedRole
from tandem.tls.renewal import RenewedCertificates

GATEWAY, WORKER = CertifiedRole.GATEWAY, CertifiedRole.WORKER
LIFE = timedelta(hours=3)


def read(directory: Path) -> tuple[Material, Material]:
    """Of a gateway and of a worker that look at their files now."""
    gateway, worker = (TlsFiles(directory / role, role).current() for role in (GATEWAY, WORKER))
    return gateway, worker


def check_call(caller: Material, called: Material) -> None:
    check_by_handshake(called.server, caller.client, str(called.name))


def test_old_and_new_files_accept_each_other(tmp_path: Path) -> None:
    certificates = RenewedCertificates(tmp_path, "up", LIFE)
    generations = [read(tmp_path)]
    for _ in range(3):
        certificates.renew()
        generations.append(read(tmp_path))
    for (old_gateway, old_worker), (new_gateway, new_worker) in pairwise(generations):
        assert old_worker.certificate != new_worker.certificate
        check_call(old_gateway, new_worker)
        check_call(new_gateway, old_worker)
    with pytest.raises(Exception, match="refused by a"):
        check_call(generations[0][0], generations[2][1])


def test_they_are_renewed_after_a_third_of_their_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewal, "CHECK_INTERVAL_S", 0.001)
    now_s = 0.0
    certificates = RenewedCertificates(tmp_path, "up", LIFE, lambda: now_s)

    async def until(is_so: Callable[[], bool]) -> None:
        while not is_so():
            await asyncio.sleep(0.001)

    def certificate() -> bytes:
        return (tmp_path / WORKER / CERTIFICATE).read_bytes()

    async def check() -> None:
        nonlocal now_s
        running = asyncio.create_task(certificates.run())
        first, now_s = certificate(), 3599.0
        await asyncio.sleep(0.05)
        assert certificate() == first
        now_s = 3600.0
        await asyncio.wait_for(until(lambda: certificate() != first), 10)
        running.cancel()

    asyncio.run(check())


def test_a_disk_that_is_full_delays_a_renewal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the directories have new files then; both halves accept each other, and the next try ends well."""
    certificates = RenewedCertificates(tmp_path, "up", LIFE)
    before = read(tmp_path)
    write, written = Authority.write, 0

    def fail_later(*given: object, **named: object) -> None:
        nonlocal written
        written += 1
        if written == 2:
            raise OSError(28, "No space left on device")
        write(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Authority, "write", fail_later)
    with pytest.raises(OSError, match="No space"):
        certificates.renew()
    half_way = read(tmp_path)
    assert half_way[0].certificate != before[0].certificate
    assert half_way[1].certificate == before[1].certificate
    check_call(half_way[0], half_way[1])
    certificates.renew()
    after = read(tmp_path)
    check_call(half_way[0], after[1])
    check_call(after[0], half_way[1])
    assert (tmp_path / WORKER / CA).read_bytes() == (tmp_path / GATEWAY / CA).read_bytes()
