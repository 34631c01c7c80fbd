"""Hosts of a group's ranks: a process tree of its own each, which joins a leader in the test's process."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from tandem.core.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.resolve import assemble
from tandem.ranks.group import RankGroup, share_of
from tandem.ranks.host_group import HostGroup
from tandem.ranks.rendezvous import Proof
from tandem.rpc.credentials import Credentials, ProcessRole
from tandem.tls.files import TlsFiles
from tandem.tls.identity import CertifiedRole
from tandem.worker.ranks import proof_of
from tests.helpers.secret import SECRET

JOIN_S = 60.0


def proof(tls: Path | None = None, secret: bytes = SECRET) -> Proof:
    files = None if tls is None else TlsFiles(tls, CertifiedRole.WORKER)
    return proof_of(Credentials(secret, ProcessRole.BOTH, tls=files))


@contextmanager
def rank_host(port: int, *arguments: str, secret: bytes = SECRET, leader: str = "127.0.0.1") -> Iterator[psutil.Popen]:
    """`python -m services.rank_host` for the leader at that port. Ended with its ranks at the end of the block."""
    command = [sys.executable, "-m", "services.rank_host", "--leader", f"{leader}:{port}", *arguments]
    environment = os.environ | {"TANDEM_CLUSTER_SECRET": secret.decode()}
    process = psutil.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        with suppress(psutil.NoSuchProcess):
            process.kill()
        process.communicate()


@contextmanager
def engine_over_hosts(
    config: EngineConfig,
    num_ranks: int,
    num_hosts: int,
    *,
    num_stages: int = 1,
    num_contexts: int = 1,
    deadline_s: float = 60.0,
    tls: Path | None = None,
) -> Iterator[tuple[Engine, RankGroup, Sequence[psutil.Popen]]]:
    """An engine whose ranks are on so many hosts, its own included; their group, and the processes of the others."""
    config = share_of(config, num_ranks // num_hosts)
    with ExitStack() as opened:
        hosts = HostGroup(
            ("127.0.0.1", 0), proof(tls), num_hosts, num_ranks, num_stages=num_stages, num_contexts=num_contexts
        )
        opened.callback(hosts.close)
        flags = [] if tls is None else ["--tls-dir", str(tls)]
        others = [opened.enter_context(rank_host(hosts.port, *flags)) for _ in range(num_hosts - 1)]
        hosts.wait(JOIN_S)
        group = RankGroup(
            config,
            num_ranks,
            num_stages=num_stages,
            num_contexts=num_contexts,
            deadline_s=deadline_s,
            hosts=hosts,
        )
        opened.callback(group.close)
        engine = assemble(config, ranks=group).engine
        yield engine, group, others
        engine.close()
