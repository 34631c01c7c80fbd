"""A worker's transport in a process of its own: `SourceProcess` starts it, this module run as a script is it.

The process prints its card in hexadecimal and serves until its standard input ends.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from json import dumps, loads
from pathlib import Path
from types import TracebackType

from tandem.core.errors import ConfigurationError
from tandem.tls.files import TlsFiles
from tandem.tls.identity import CertifiedRole
from tandem.transport.base import KVTransport, MemoryPool
from tandem.transport.card import Identity
from tests.helpers.secret import SECRET
from tests.helpers.transport_pools import COMPATIBILITY, pool_of, seeded_pages

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class SourceSpec:
    """Pool that the process serves, and the transport by which it does."""

    transport: str
    seed: int = 7
    num_blocks: int = 64
    page_bytes: int = 4096
    num_ranks: int = 1
    piece_bytes: int | None = None
    port: int = 0
    tls_dir: str | None = None
    secret: str = SECRET.hex()
    compatibility: Mapping[str, str] = field(default_factory=lambda: dict(COMPATIBILITY))


def build_transport(spec: SourceSpec, pool: MemoryPool, identity: Identity) -> KVTransport:
    """A transport that listens as `spec` says. Imported where used: nixl is slow to load."""
    if spec.transport == "tcp":
        from tandem.transport.tcp.transport import TcpConfig, TcpTransport

        tls = None if spec.tls_dir is None else TlsFiles(Path(spec.tls_dir), CertifiedRole.WORKER)
        return TcpTransport(pool, identity, TcpConfig(port=spec.port, tls=tls))
    if spec.transport == "cma":
        from tandem.transport.cma import CmaTransport

        return CmaTransport(pool, identity)
    if spec.transport == "nixl":
        from tandem.transport.nixl.transport import NixlTransport

        return NixlTransport(pool, identity)
    raise ConfigurationError(f"no process serves {spec.transport!r}")


class SourceProcess:
    """A running source. Leaving the context kills it."""

    def __init__(self, spec: SourceSpec) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.transport_process", dumps(asdict(spec))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=environment,
        )
        assert self._process.stdout is not None
        self.card = bytes.fromhex(self._process.stdout.readline().decode())
        self.spec = spec
        self.pages = seeded_pages(spec.seed, spec.num_blocks, spec.page_bytes)

    def freeze(self) -> None:
        """SIGSTOP; returns when every thread has stopped, which takes a while on a busy machine."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def thaw(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """End it in good order; returns when it is gone."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=20)

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def __enter__(self) -> "SourceProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


def _serve(spec: SourceSpec) -> None:
    pages = seeded_pages(spec.seed, spec.num_blocks, spec.page_bytes)
    identity = Identity(spec.compatibility, secret=bytes.fromhex(spec.secret))
    transport = build_transport(spec, pool_of(pages, spec.num_ranks, spec.piece_bytes), identity)
    sys.stdout.write(transport.card().hex() + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    transport.close()


if __name__ == "__main__":
    _serve(SourceSpec(**loads(sys.argv[1])))
