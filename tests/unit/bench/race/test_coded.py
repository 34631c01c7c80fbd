"""The race of coded weights: who takes part, what is served, and who is compared with whom."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import gguf
import pytest

from bench.checkpoints import DEMO
from bench.race.coded import ACTIVATIONS, entrants
from bench.race.measure import budget, coded_floors
from bench.race.ours import Tandem, weight_bytes
from bench.race.peers.gguf_file import write_gguf
from bench.race.shapes import group_size
from bench.race.summary import Comparison, Summary, bits_of, is_peer
from bench.race.system import Served
from bench.race.table import markdown
from bench.race.workloads import Workload
from tandem.models.gguf.convert import converted
from tests.helpers import checkpoints
from tests.helpers.checkpoints import read_tensors
from tests.unit.bench.race.runs_by_hand import run
from tests.unit.bench.race.test_measure import BY_KEY, COST, RATES

SERVED = Served("http://127.0.0.1:1", "m", (), kv_cache_bytes=6_000_000, weight_bytes=5_000_000)


def test_every_number_of_bits_has_ours_and_peers(tmp_path: Path) -> None:
    names = [system.name for system in entrants(tmp_path, "bfloat16")]
    assert len(set(names)) == len(names)
    for bits in (8, 4):
        assert {is_peer(name) for name in names if bits_of(name) == bits} == {True, False}
    assert {bits_of(name) for name in names} == {8, 4}


@pytest.mark.parametrize("name", ["tandem", "tandem-1p1d", "vllm", "vllm-1p1d", "openvino", "transformers"])
def test_the_other_race_has_16_bits(name: str) -> None:
    assert bits_of(name) == 16


def test_activations_are_rounded_where_the_name_says_so(tmp_path: Path) -> None:
    for system in entrants(tmp_path, "bfloat16", ["--block-size", "32"]):
        if isinstance(system, Tandem):
            command = system.command(tmp_path, 1)
            assert (ACTIVATIONS[0] in command) == system.name.endswith("-a8")
            assert "--block-size" in command


def test_ours_are_compared_with_the_best_peer_of_as_many_bits() -> None:
    rates = {"tandem-int4-a8": 3.0, "openvino-int4": 2.0, "llama-q4_0": 1.0, "llama-q8_0": 9.0}
    found = Summary.of("small", [run(system, "batch", output_rate=rate) for system, rate in rates.items()])
    assert list(found.comparisons("batch", "output rate")) == [Comparison("tandem-int4-a8", "openvino-int4", 1.5)]
    assert "| 3, 1.50 x openvino-int4 |" in markdown(found, {}, {})


def test_a_stream_alone_reads_the_file_and_its_context() -> None:
    workload: Workload = BY_KEY["single"]
    found = coded_floors(workload, COST, RATES, 5_000_000)
    assert found == {"TPOT p50": pytest.approx(1e3 * (5_000_000 + 32 * (128 + 255) / 2) / 1e9)}
    assert coded_floors(BY_KEY["batch"], COST, RATES, 5_000_000) == {}


def test_memory_is_that_of_the_codes() -> None:
    assert budget(COST, SERVED) == {"peak memory": 5 + 6 + 300}
    assert budget(COST, replace(SERVED, weight_bytes=None))["peak memory"] == COST.weight_bytes / 1e6 + 6 + 300


@pytest.mark.parametrize(("hidden", "expected"), [(1024, 128), (576, 64)])
def test_groups_divide_rows(hidden: int, expected: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": hidden, "intermediate_size": 1536}))
    assert group_size(tmp_path) == expected


@pytest.mark.parametrize("build", [checkpoints.save_tiny_llama, checkpoints.save_tiny_qwen3])
def test_the_file_for_llama_cpp_holds_the_checkpoint(build: checkpoints.Builder, tmp_path: Path) -> None:
    """Served from it, the model has the checkpoint's tensors, rows of q and k among them, to the bit."""
    source = build(tmp_path / "plain", dtype="bfloat16", vocab_size=4200)  # more than the tokenizer has
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, source / name)
    write_gguf(source, tmp_path / "model.gguf")
    assert not list(tmp_path.glob("*.partial"))
    expected, found = read_tensors(source), read_tensors(converted(tmp_path / "model.gguf", tmp_path / "cache"))
    for name, tensor in expected.items():
        if name in found:
            assert found[name].float().equal(tensor.float()), name
    assert {"model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"} <= found.keys()
    words = gguf.GGUFReader(tmp_path / "model.gguf").fields["tokenizer.ggml.tokens"].data
    assert len(words) == json.loads((source / "config.json").read_text())["vocab_size"]


def test_bytes_of_weights_are_those_of_their_files(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    (tmp_path / "config.json").write_bytes(b"{}")
    assert weight_bytes(tmp_path) == weight_bytes(tmp_path / "model.safetensors") == 5
