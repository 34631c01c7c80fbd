"""vLLM's 1P1D: who is told what, and on which cores."""

import json
import os
from pathlib import Path

import pytest

from bench.race.peers.process import Program, cores
from bench.race.peers.vllm_pd import DECODE, PREFILL, Role, VllmPrefillDecode

CHECKPOINT = Path("/checkpoints/small")


def cpus(program: Program) -> list[int]:
    assert program.command[:2] == ["taskset", "--cpu-list"]
    return [int(cpu) for cpu in program.command[2].split(",")]


def transfer(program: Program) -> dict[str, str]:
    found: dict[str, str] = json.loads(program.command[program.command.index("--kv-transfer-config") + 1])
    return found


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two workers need a core each, and this process has one")
def test_each_has_cores_of_its_own() -> None:
    system = VllmPrefillDecode()
    prefill, decode = (system.server(role, CHECKPOINT, 8000, 5600) for role in (PREFILL, DECODE))
    assert not set(cpus(prefill)) & set(cpus(decode))
    assert {*cpus(prefill), *cpus(decode)} == set(cores())
    assert prefill.environment["OMP_NUM_THREADS"] == str(len(cpus(prefill)))


def test_they_can_share_all_cores() -> None:
    server = VllmPrefillDecode(own_cores=False).server(PREFILL, CHECKPOINT, 8000, 5600)
    assert cpus(server) == cores()
    assert server.environment["OMP_NUM_THREADS"] == str(len(cores()))


@pytest.mark.parametrize(("role", "kv_role"), [(PREFILL, "kv_producer"), (DECODE, "kv_consumer")])
def test_blocks_move_through_nixl_in_host_memory(role: Role, kv_role: str) -> None:
    server = VllmPrefillDecode().server(role, CHECKPOINT, 8000, 5600)
    assert transfer(server) == {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu", "kv_role": kv_role}
    assert server.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"
    assert server.log.name == f"vllm-1p1d-{role.name}.log"


def test_the_proxy_knows_both() -> None:
    command = " ".join(VllmPrefillDecode().proxy(1, 2, 3).command)
    assert "--port 1 --prefill-url http://127.0.0.1:2 --decode-url http://127.0.0.1:3" in command
