"""vLLM's own way of 1 prefill + 1 decode: two servers with NixlConnector, and a proxy that asks one after the other.

Each server has half of the cores and as many threads, unless told otherwise. Graphs are not compiled: with the
connector they were no clear gain in short trials and take minutes to make.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bench.race.peers import vllm
from bench.race.peers.environment import BUILD, Environment, prepare
from bench.race.peers.process import HOST, Program, answers, cores, ports, running
from bench.race.system import Served

TRANSFER = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}


@dataclass(frozen=True, slots=True)
class Role:
    """One of the two servers."""

    name: str
    kv_role: str
    index: int


PREFILL = Role("prefill", "kv_producer", 0)
DECODE = Role("decode", "kv_consumer", 1)


@dataclass(frozen=True, slots=True)
class VllmPrefillDecode:
    """`own_cores`: half of the cores and as many threads each, else all of them for both."""

    name: str = "vllm-1p1d"
    build: Path = BUILD
    dtype: str = "bfloat16"
    own_cores: bool = True

    @property
    def environment(self) -> Environment:
        return replace(vllm.ENVIRONMENT, build=self.build)

    def prepare(self) -> None:
        prepare(self.environment)

    @contextmanager
    def serve(self, checkpoint: Path) -> Iterator[Served]:
        prefill_port, decode_port, port, *side = ports(5)
        prefill = self.server(PREFILL, checkpoint, prefill_port, side[0])
        decode = self.server(DECODE, checkpoint, decode_port, side[1])
        proxy = self.proxy(port, prefill_port, decode_port)
        with running(prefill, decode, proxy) as pids:
            yield Served(f"http://{HOST}:{port}", vllm.MODEL, pids, is_ready=partial(answers, proxy.ready_url))

    def body(self, prompt: Sequence[int], num_output: int) -> dict[str, object]:
        return vllm.body()

    def server(self, role: Role, checkpoint: Path, port: int, side_port: int) -> Program:
        """One of the two. `side_port`: where it tells the other about its memory."""
        own = cores()[role.index :: 2] if self.own_cores else cores()
        transfer = json.dumps({**TRANSFER, "kv_role": role.kv_role})
        command = [
            *("taskset", "--cpu-list", ",".join(map(str, own))),
            *vllm.command(self.environment, checkpoint, port, self.dtype),
            "--enforce-eager",
            *("--kv-transfer-config", transfer),
        ]
        variables = {
            **vllm.variables(self.environment, num_threads=len(own)),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port),
            "UCX_TLS": "tcp,sm,self",
            "UCX_NET_DEVICES": "lo",
        }
        name = f"{self.name}-{role.name}"
        return Program(name, command, self.environment.log(name), vllm.health(port), variables)

    def proxy(self, port: int, prefill_port: int, decode_port: int) -> Program:
        command = [
            str(self.environment.python),
            *("-m", "bench.race.peers.scripts.pd_proxy"),
            *("--port", str(port)),
            *("--prefill-url", f"http://{HOST}:{prefill_port}"),
            *("--decode-url", f"http://{HOST}:{decode_port}"),
        ]
        name = f"{self.name}-proxy"
        return Program(name, command, self.environment.log(name), vllm.health(port))
