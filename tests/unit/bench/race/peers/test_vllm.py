"""vLLM's command line and what its environment tells it: the configuration that makes the race fair."""

import json
from pathlib import Path

import pytest

from bench.race.peers import peers
from bench.race.peers.openvino import OpenVino
from bench.race.peers.process import cores
from bench.race.peers.transformers import Transformers
from bench.race.peers.vllm import ENVIRONMENT, Vllm, command, variables
from bench.race.peers.vllm_pd import PREFILL, VllmPrefillDecode
from bench.race.system import NotHere


def test_command_and_variables() -> None:
    asked = command(ENVIRONMENT, Path("/checkpoints/small"), 8000, "bfloat16")
    assert asked[0].endswith("build/race/venvs/vllm/bin/vllm")
    assert asked[1:3] == ["serve", "/checkpoints/small"]
    flags = " ".join(asked)
    for flag in ("--dtype bfloat16", "--max-model-len 4096", "--distributed-executor-backend uni", "--port 8000"):
        assert flag in flags
    assert "--enforce-eager" not in flags
    told = variables(ENVIRONMENT, num_threads=2)
    assert told["OMP_NUM_THREADS"] == "2"
    assert told["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert told["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_lengths_are_forced_and_tokens_told() -> None:
    assert Vllm().body([1, 2], 16) == {"ignore_eos": True, "return_token_ids": True}


def test_all_peers_are_told_what_to_multiply(tmp_path: Path) -> None:
    for dtype, precision in (("bfloat16", "bf16"), ("float32", "f32")):
        plain, openvino, transformers, pair = peers(tmp_path, dtype)
        assert isinstance(plain, Vllm)
        assert isinstance(openvino, OpenVino)
        assert isinstance(transformers, Transformers)
        assert isinstance(pair, VllmPrefillDecode)
        servers = plain.server(tmp_path, 1), pair.server(PREFILL, tmp_path, 1, 2)
        for asked in (*(list(server.command) for server in servers), transformers.command(tmp_path, 1)):
            assert asked[asked.index("--dtype") + 1] == dtype
        asked = openvino.command(tmp_path, 1)
        assert asked[asked.index("--precision") + 1] == precision


def test_with_drafts_vllm_runs_once_more(tmp_path: Path) -> None:
    plain, drafting, *others = peers(tmp_path, drafting=True)
    assert [plain, *others] == peers(tmp_path)
    assert isinstance(plain, Vllm)
    assert isinstance(drafting, Vllm)
    assert drafting.name == "vllm-drafts"
    *command, flag, said = drafting.server(tmp_path, 1).command
    assert (command, flag) == ([*plain.server(tmp_path, 1).command], "--speculative-config")
    drafts = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 8}
    assert json.loads(said) == drafts


def test_without_its_environment_it_is_not_here(tmp_path: Path) -> None:
    with pytest.raises(NotHere, match="vllm cannot be started"):
        Vllm(build=tmp_path).serve(tmp_path).__enter__()


def test_all_peers_have_names_of_their_own_and_go_where_asked(tmp_path: Path) -> None:
    found = peers(tmp_path)
    assert [system.name for system in found] == ["vllm", "openvino", "transformers", "vllm-1p1d"]
    for system in found:
        with pytest.raises(NotHere):
            system.serve(tmp_path / "checkpoint").__enter__()
    assert {path.name for path in (tmp_path / "logs").iterdir()} >= {"vllm.log", "openvino-export.log"}
    assert cores()
