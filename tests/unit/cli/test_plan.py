import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.architecture.cost import ModelCost
from tandem.architecture.fields import Fields
from tandem.architecture.registry import find_family
from tandem.cli.main import main
from tandem.cli.model_cost import named_model
from tandem.compute.torch.kernels import TorchKernels
from tandem.models.loader import load_model
from tests.helpers.checkpoints import save_tiny_llama, save_tiny_qwen3_moe
from tests.helpers.gguf_files import write_gguf
from tests.helpers.hub import Hub
from tests.helpers.published_formats import FORMATS, MIXED, compressed, floats, integers, save_published
from tests.unit.architecture.published import CHECKPOINTS

DEMO = Path(__file__).parents[3] / "demo" / "tandem-demo"
QWEN = ["plan", "--model", "qwen3-8b"]
ONE_OF_EACH = {one.config["architectures"][0]: one.config for one in CHECKPOINTS if one.refused is None}
VECTORS = 0.002  # share of parameters that are of no matrix: a plan does not count them
QUICKLY_PLANNED = ("LlamaForCausalLM", "Qwen3MoeForCausalLM", "GraniteMoeHybridForCausalLM", "DeepseekV32ForCausalLM")


def plan_json(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main([*QWEN, "--json", *arguments]) == code
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    return value


def rows(text: str) -> dict[str, list[str]]:
    """First column of each line that has cells, and the cells."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("   ") if cell.strip()]
        if len(cells) > 1:
            found[cells[0]] = cells[1:]
    return found


def test_the_published_arithmetic_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Qwen3-8B at 40k tokens on an H100: 147 KB a token, 6 GB, 22 GB swept, 6.6 ms; prefill 0.76 s where the products
    run at 8 bits and 1.04 s where they do not.
    """
    arguments = [*QWEN, "--input-tokens", "40000", "--output-tokens", "500", "--ttft-ms", "3000"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    found = rows(out)
    assert "147 KB of KV per token" in out
    assert found["KV of a prompt of 40,000 tokens"] == ["5.90 GB", "5.90 GB"]
    assert found["its prefill: at best, likely"] == ["1.04 s, 1.89 s"]
    assert found["swept by a step after it"] == ["22.3 GB"]
    assert found["that step: at best, likely"][0].startswith("6.7 ms")
    assert found["ridge, FLOP per byte"] == ["295", "295"]
    assert main([*arguments, "--products-8bit"]) == 0
    assert rows(capsys.readouterr().out)["its prefill: at best, likely"][0].startswith("758 ms")


def test_pools_latencies_cost_and_the_alternative_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--rate", "2,20", "--decode-hardware", "h200", "--prefix-hit", "0.5", "--slo-share", "0.9"]
    assert main([*QWEN, *arguments]) == 0
    out = capsys.readouterr().out
    value = plan_json(capsys, *arguments)
    peak = value["rates"][1]
    found = rows(out)
    pools = (peak["disaggregated"]["prefill"], peak["disaggregated"]["decode"], peak["aggregated"]["prefill"])
    assert found["workers"] == [str(pool["num_workers"]) for pool in pools]
    assert found["what asks for so many"] == [pool["limit"] for pool in pools]
    assert found["cost an hour"] == [f"${pool['usd_per_hour']:.2f}" for pool in pools]
    assert "TTFT: mean, p90" in found
    assert found["2"][2] == str(value["rates"][0]["disaggregated"]["num_accelerators"])
    assert "plan for 20 requests/s:" in out
    assert "workers that do both can meet it:" in out
    picture = [line for line in out.splitlines() if "┤" in line]
    assert len(picture) == 13
    assert {"P", "d", "D", "·", "─"} <= set("".join(picture))
    assert "1 x h200: 989 TFLOP/s, 4.8 TB/s, ridge at 206 FLOP per byte" in out


def test_json_has_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    value = plan_json(capsys, "--rate", "5", "--mfu", "0.4")
    assert value["assumptions"]["mfu"] == 0.4
    assert value["model"]["kv_bytes_per_token"] == 147_456
    assert value["workers"]["decode"]["kv_tokens"] > 300_000
    speed = value["workers"]["prefill"]["speed"]["prefill"]
    assert speed["ms_per_token"] == pytest.approx(1000 * 2 * 6.9458e9 / 989e12 / 0.4, rel=0.001)
    sizing = value["rates"][0]["disaggregated"]
    assert sizing["ttft"]["high_ms"] <= 1000
    assert sizing["problems"] == []
    assert value["fits"] is True


def test_widths_are_searched_and_the_plan_is_of_those_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    value = plan_json(capsys, "--tp", "auto")
    assert (value["widths"]["prefill"], value["widths"]["decode"]) == (1, 1)
    assert [each["width"] for each in value["widths"]["divide"]] == [1, 2, 4, 8]
    assert main([*QWEN, "--tp", "auto"]) == 0
    heading, first, *_ = capsys.readouterr().out.splitlines()
    assert heading.split()[0] == "ranks"
    assert first.split()[-2:] == ["chosen", "chosen"]
    assert plan_json(capsys, "--tp", "2")["workers"]["decode"]["num_accelerators"] == 2


def test_stages_are_searched_beside_widths(capsys: pytest.CaptureFixture[str]) -> None:
    value = plan_json(capsys, "--tp", "2", "--pp", "auto")
    assert [(each["width"], each["num_stages"]) for each in value["widths"]["divide"]] == [(2, 1), (2, 2), (2, 4)]
    assert (value["widths"]["decode"], value["widths"]["decode_stages"]) == (2, 1)
    assert value["widths"]["divide"][1]["as_decode"].startswith("costs $")
    assert main([*QWEN, "--tp", "2", "--pp", "2"]) == 0
    assert "4 x h100 in 2 stages" in capsys.readouterr().out


def test_the_table_of_stages_tells_what_they_send_and_how_long_they_wait(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QWEN, "--tp", "1", "--pp", "auto"]) == 0
    out = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "1 x 2 stages 8.19 GB 73.7 KB 0 0 KB 8 KB 11% - 33%" in out
    assert "Idle stages: the share of a step" in out


def test_what_cannot_be_met_ends_with_one_and_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QWEN, "--input-tokens", "40000", "--ttft-ms", "500"]) == 1
    out = capsys.readouterr().out
    assert "cannot be met: TTFT 500 ms cannot be met by any number of prefill workers" in out
    assert "workers that do both" not in out
    assert main([*QWEN, "--output-tokens", "2", "--tpot-ms", "7.5"]) == 1
    out = capsys.readouterr().out
    assert "the hand-off adds 8.2 ms to each token" in out
    assert "workers that do both can meet it: 8 of 1 x h100" in out
    value = plan_json(capsys, "--input-tokens", "40000", "--ttft-ms", "500", code=1)
    assert len(value["rates"][0]["disaggregated"]["problems"]) == 1


def test_a_model_that_does_not_fit_gets_no_pools(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama-3-70b"]) == 1
    out = capsys.readouterr().out
    assert "cannot hold llama-3-70b" in out
    assert re.search(r"^memory for KV +none: [\d.]+ GB too few +none: [\d.]+ GB too few", out, re.MULTILINE)
    assert "pools at" not in out
    assert main(["plan", "--model", "llama-3-70b", "--accelerators", "4", "--ttft-ms", "2000"]) == 0
    assert "4 x h100" in capsys.readouterr().out


@pytest.mark.parametrize(("model", "rate"), [("qwen3-8b", "600"), ("llama-3-70b", "100")])
def test_more_than_any_number_of_workers_can_do_is_said(
    model: str, rate: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", "--model", model, "--hardware", "cpu", "--rate", rate]
    assert main(arguments) == 1
    assert "cannot be met: prompt work: 16,384 workers do not suffice" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 1
    together = json.loads(capsys.readouterr().out)["rates"][0]["aggregated"]
    assert together["prefill"]["num_workers"] == 16_384
    assert "prompt and token work: 16,384 workers do not suffice" in together["problems"]


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=() if name in QUICKLY_PLANNED else pytest.mark.slow) for name in sorted(ONE_OF_EACH)],
)
def test_every_architecture_is_planned_from_the_specs_that_the_loader_reads(
    architecture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parameters, those of a token, bytes of experts and of a token's state, of a published configuration."""
    config = ONE_OF_EACH[architecture]
    (tmp_path / "config.json").write_text(json.dumps(config))
    hardware = ("--hardware", "h200,gb=1000", "--accelerators", "4")
    assert main(["plan", "--json", "--weight-bits", "16", "--model", str(tmp_path), *hardware]) == 0
    told = json.loads(capsys.readouterr().out)["model"]
    fields = Fields(config, "config.json")
    spec = find_family(fields).read_model(fields)
    cost = ModelCost("", spec)
    assert told["num_parameters"] == pytest.approx(sum(tensor.size for tensor in spec.tensors()), rel=VECTORS)
    assert told["num_active_parameters"] == cost.num_active_parameters
    assert told["kv_bytes_per_token"] == cost.kv_bytes_per_token
    experts = [routed for layer in spec.layers if (routed := layer.routed) is not None]
    assert told["expert_bytes"] == 2 * sum(routed.num_experts * routed.expert_size for routed in experts)
    assert told["num_active_parameters"] <= told["num_parameters"]


def test_a_small_state_of_a_request_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: the state of LFM2's convolutions was 0 MB."""
    (tmp_path / "config.json").write_text(json.dumps(ONE_OF_EACH["Lfm2ForCausalLM"]))
    assert main(["plan", "--model", str(tmp_path)]) == 0
    assert "of KV per token and 0.0819 MB of state per request" in capsys.readouterr().out


def test_a_model_directory_and_a_hardware_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", str(DEMO), "--hardware", "cpu,tflops=0.1,gb-per-s=20,gb=8,usd=0.2"]
    assert main([*arguments, "--input-tokens", "500-1500", "--rate", "3", "--link", "tcp-10g"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("tandem-demo: 3.4 M parameters, 6.8 MB at 16 bits, 2 KB of KV per token")
    assert "100 GFLOP/s, 20 GB/s, ridge at 5 FLOP per byte" in out


def test_a_trace_gives_lengths_and_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    lines = [f"2023-11-16 18:00:{second:02d}.0000000,{1000 + 100 * second},50" for second in range(0, 41, 2)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    value = plan_json(capsys, "--trace", str(trace))
    assert value["workload"]["mean_prompt_tokens"] == 3000
    assert value["workload"]["longest_tokens"] == 5050
    assert value["rates"][0]["rate_per_s"] == pytest.approx(21 / 40)


def test_requests_beyond_the_model_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QWEN, "--input-tokens", "60000", "--ttft-ms", "9000"]) == 0
    assert "the longest request has 60,300 tokens, qwen3-8b is made for 40,960" in capsys.readouterr().out


def test_the_figure_is_the_same_every_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib, which draws the figure, is not installed")
    first, second = tmp_path / "a.svg", tmp_path / "b.svg"
    for path in (first, second):
        assert main([*QWEN, "--figure", str(path)]) == 0
    capsys.readouterr()
    assert first.read_bytes() == second.read_bytes()
    assert "FLOP per byte" in first.read_text()
    assert "prefill of the mean prompt, 2,000 tokens" in first.read_text()
    assert main([*QWEN, "--figure", str(tmp_path / "none" / "a.svg")]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "gpt-5"], "--model='gpt-5' is neither a directory, nor a Hugging Face name"),
        (["--model", "/no/such"], "nor a built-in model: qwen3-0.6b"),
        (["--hardware", "abacus"], "hardware 'abacus' is not known; choose one of h100"),
        (["--decode-hardware", "h100,gb=x"], "'gb=x' is not above zero; write gb=NUMBER"),
        (["--link", "string"], "link 'string' is not known; choose one of nvlink"),
        (["--input-tokens", "many"], "--input-tokens='many'"),
        (["--output-tokens", "0"], "--output-tokens='0': Fixed lengths need num_tokens >= 1"),
        (["--rate", "0"], "each above zero requests a second"),
        (["--ttft-ms", "-1"], "--ttft-ms="),
        (["--context", "0"], "--context="),
        (["--tp", "3"], "--tp='3'"),
        (["--tp", "2", "--accelerators", "2"], "--tp=2 with --accelerators or --decode-accelerators; give one of them"),
        (["--tp", "auto", "--pp", "9"], "--pp='9'"),
        (["--pp", "2"], "--pp=2 without --tp; give --tp=1, 2, 4, 8 or auto with it"),
        (["--tp", "8", "--pp", "4"], "tp=8 with pp=4 are 32 ranks, and a worker has at most 16; give pp=2 or less"),
        (["--prefix-hit", "1"], "--prefix-hit="),
        (["--mfu", "2"], "--mfu="),
        (["--trace", "no.csv"], "'no.csv' cannot be read"),
        (["--figure", "roof.gif"], "end the name with one of .svg, .png, .pdf"),
    ],
)
def test_bad_input_is_named_with_the_remedy(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*QWEN, *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_checkpoint_that_cannot_be_planned_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(tmp_path)]) == 2
    assert "config.json cannot be read" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    assert main(["plan", "--model", str(tmp_path)]) == 2
    assert "model_type='mamba' is not served; supported architectures: DeepseekV2ForCausalLM" in capsys.readouterr().err


def test_it_runs_without_torch_and_says_what_a_missing_network_means() -> None:
    """In a process of its own: the hub library reads its environment when it is imported."""
    code = "import sys, tandem.cli.main as m; c = m.main(sys.argv[1:]); sys.exit(99 if 'torch' in sys.modules else c)"
    run = subprocess.run(
        [sys.executable, "-c", code, "plan", "--model", "nobody/nothing"],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert "config.json of 'nobody/nothing' cannot be fetched" in run.stderr
    assert "or name a built-in model: qwen3-0.6b" in run.stderr


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}


@pytest.mark.parametrize(
    ("quantisation", "bits"),
    [
        (GPTQ, 4 + 16 / 128),
        (GPTQ | {"bits": 8, "group_size": -1, "sym": False}, 8),
        ({"quant_method": "awq", "group_size": 64}, 4 + 48 / 64),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 8 / 128),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
        (compressed("pack-quantized", integers(4, "group", 32)), 4.5),
        (compressed("mxfp4-pack-quantized", floats(4, "group", 32)), 4.25),
    ],
)
def test_a_quantised_checkpoint_is_sized_by_its_own_bits(
    quantisation: dict[str, object], bits: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: a GPTQ checkpoint of 4 bits was planned for at 16. NOTE: without its files, whose scales may be of
    more bits.
    """
    config = json.loads((DEMO / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantisation}))
    cost = named_model(str(tmp_path), weight_bits=None, kv_bits=16)
    tensors = list(cost.model.tensors())
    coded = sum(tensor.size for tensor in tensors if len(tensor.shape) == 2 and "layers" in tensor.name)
    total = sum(tensor.size for tensor in tensors)
    assert cost.weight_bits == pytest.approx((coded * bits + (total - coded) * 16) / total, rel=0.02)
    assert named_model(str(tmp_path), weight_bits=3, kv_bits=16).weight_bits == 3
    assert main(["plan", "--model", str(tmp_path)]) in (0, 1)
    assert f"at {cost.weight_bits:.3g} bits" in capsys.readouterr().out


SIZES: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 2}
OF_FILES = "some floats"  # which the configuration does not name
SEVERAL_FORMATS = {
    "mixed": (MIXED, save_tiny_qwen3_moe, {"4-bit codes decoded in registers", "fp8 codes decoded in registers"}),
    "dynamic": (
        FORMATS["gptq of several kinds"],
        save_tiny_llama,
        {"4-bit codes decoded in registers", "int8 codes decoded in registers"},
    ),
    OF_FILES: (FORMATS["fp8 channels"], save_tiny_llama, {"fp8 codes decoded in registers"}),
    "W8A8": (FORMATS["compressed W8A8"], save_tiny_llama, {"int8 codes by rows rounded to int8"}),
}


@pytest.mark.parametrize(
    ("name", "has_files"),
    [*((name, True) for name in SEVERAL_FORMATS), *((name, False) for name in SEVERAL_FORMATS if name != OF_FILES)],
)
def test_each_module_is_sized_by_the_format_that_the_loader_gives_it(
    name: str, has_files: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: all were counted as those of the first group, and modules that are left out as codes."""
    published, save, kinds = SEVERAL_FORMATS[name]
    coded = tmp_path / "coded"
    save_published(save(tmp_path / "plain", dtype="bfloat16", **SIZES), published, coded, tmp_path / "decoded")
    loaded = load_model(str(coded), dtype="bfloat16", device=torch.device("cpu"), kernels=TorchKernels())
    weights = {id(each): each for each in loaded.decoder.parameters.weights.values()}.values()
    tables = [tensor for tensor in loaded.decoder.parameters.tensors.values() if tensor.dim() > 1]
    held = sum(weight.num_bytes for weight in weights) + sum(tensor.nbytes for tensor in tables)
    if not has_files:
        (coded / "model.safetensors").unlink()
    cost = named_model(str(coded), weight_bits=None, kv_bits=16)
    assert cost.weight_bytes == pytest.approx(held, rel=0.02)
    experts = [each.num_bytes for key, each in loaded.decoder.parameters.weights.items() if ".experts." in key]
    assert cost.expert_bytes == pytest.approx(sum(experts), rel=0.05)
    shares = {str(each.products): each.share for each in cost.shares}
    assert shares.keys() == kinds | {"16-bit floats"}
    assert sum(shares.values()) == pytest.approx(1)
    main(["plan", "--model", str(coded)])
    out = capsys.readouterr().out
    (line,) = (line for line in out.splitlines() if line.startswith("products, by share of the weights: "))
    assert all(f"{share:.1%} {kind}" in line for kind, share in shares.items())
    assert line.endswith(f"planned at the {8 if name == 'W8A8' else 16}-bit rate")
    main(["plan", "--model", str(coded), "--json", "--no-products-8bit"])
    told = json.loads(capsys.readouterr().out)
    assert told["model"]["products"] == shares
    assert told["assumptions"]["products_8bit"] is False


def test_a_checkpoint_in_an_unknown_format_is_not_sized_as_if_it_were_in_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((DEMO / "config.json").read_text()) | {"quantization_config": {"quant_method": "aqlm"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", "--model", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert 'quant_method="aqlm" is not served; supported: awq, bitsandbytes' in said
    assert "plan for its unquantised checkpoint" in said


def test_mixtral_is_planned_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "mixtral-8x7b", "--json"]) in (0, 1)
    model = json.loads(capsys.readouterr().out)["model"]
    assert model["num_parameters"] == pytest.approx(46.7e9, rel=0.01)


def test_a_revision_on_the_hub_is_planned_for(tmp_path: Path) -> None:
    """Regression: the revision was taken for a part of the name, which `tandem up` takes apart."""
    code = "import sys, tandem.cli.main as m; sys.exit(m.main(sys.argv[1:]))"
    with Hub.running(("config.json",)) as hub:
        run = subprocess.run(
            [sys.executable, "-c", code, "plan", "--model", "a/b@v1.0"],
            env=hub.environment(tmp_path),
            capture_output=True,
            text=True,
            check=False,
        )
    commit = hub.asked.index("GET /api/models/a/b/revision/v1.0")
    assert any(asked.endswith("/config.json") for asked in hub.asked[commit:])
    assert "architectures" in run.stderr


@pytest.mark.parametrize("name", ["a/b", "a/b:q4_1@v1.0"])
def test_a_gguf_file_on_the_hub_is_planned_for_by_its_header(name: str, tmp_path: Path) -> None:
    plain = save_tiny_llama(tmp_path / "plain", hidden_size=256, intermediate_size=1024)
    content = write_gguf(plain, tmp_path / "tiny.gguf", type_name="Q4_1").read_bytes()
    code = "import sys, tandem.cli.main as m; sys.exit(m.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "plan", "--model", name, "--json"]
    runs = []
    with Hub.running(("tiny-Q4_1.gguf",), {"tiny-Q4_1.gguf": content}) as hub:
        environment = hub.environment(tmp_path) | {"TANDEM_CACHE_DIR": str(tmp_path / "tandem")}
        runs.append(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
        assert 0 < hub.sent["tiny-Q4_1.gguf"] < len(content)
    offline = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "Retrying" not in offline.stderr, "it waits for a hub that does not answer"
    runs.append(offline.stdout)
    local = [*command[:-2], str(tmp_path / "tiny.gguf"), "--json"]
    runs.append(subprocess.run(local, env=environment, capture_output=True, text=True, check=True).stdout)
    costs = [{key: value for key, value in json.loads(run).items() if key != "model"} for run in runs]
    assert costs[0] == costs[1] == costs[2]


def test_the_memory_of_a_context_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSeek-V3.2 keeps 704 numbers a token and layer, of which a token reads 2,048 rows and all index keys."""
    asked = ["plan", "--model", "deepseek-v3.2", "--context", "32768"]
    assert main(asked) == 0
    found = rows(capsys.readouterr().out)
    assert found["latent 512 + rotated key 64 16-bit, index key 128"] == ["61", "2.81 GB", "656 MB", "512 MB"]
    assert found["all"] == ["61", "2.81 GB", "656 MB", "512 MB"]
    assert main([*asked, "--json", "--kv-bits", "8"]) == 0
    memory = json.loads(capsys.readouterr().out)
    rows_read, keys = 61 * 2048 * 576, 61 * 32_768 * 128
    assert (memory["held_bytes"], memory["read_bytes"]) == (61 * 32_768 * 704, rows_read + keys)
    (line,) = memory["layers"]
    assert (line["read_bytes"], line["scanned_bytes"]) == (rows_read + keys, keys)


def test_a_million_tokens_of_latents_of_fewer_bits_that_are_chosen_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Qwen3-8B's 36 layers keep 147 GB; latents of an eighth of the numbers 18, of 4 bits 4.6, of which a token reads a
    tenth: the keys of eight indexers, each of which chooses for five layers, and 2,048 latents a layer.
    """
    latent: dict[str, Any] = {
        "num_hidden_layers": 36,
        "kv_lora_rank": 192,
        "qk_rope_head_dim": 64,
        "max_position_embeddings": 1 << 20,
    }
    shared = {"indexer_types": ["shared" if layer % 5 else "full" for layer in range(36)]}
    configs = {
        "latents": {**ONE_OF_EACH["DeepseekV3ForCausalLM"], **latent},
        "chosen": {**ONE_OF_EACH["GlmMoeDsaForCausalLM"], **latent, **shared},
    }
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))

    def all_layers(model: str, *more: str) -> list[str]:
        assert main(["plan", "--model", model, "--context", "1000000", *more]) == 0
        return rows(capsys.readouterr().out)["all"]

    assert all_layers("qwen3-8b") == ["36", "147 GB", "147 GB", "0 B"]
    assert all_layers(str(tmp_path / "latents")) == ["36", "18.4 GB", "18.4 GB", "0 B"]
    assert all_layers(str(tmp_path / "latents"), "--kv-bits", "4") == ["36", "4.61 GB", "4.61 GB", "0 B"]
    assert all_layers(str(tmp_path / "chosen"), "--kv-bits", "4") == ["36", "5.12 GB", "521 MB", "512 MB"]


def test_the_memory_of_layers_with_many_states_shows_its_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: a long description of what a layer keeps left no room for the columns of numbers."""
    (tmp_path / "config.json").write_text(json.dumps(ONE_OF_EACH["DeepseekV4ForCausalLM"]))
    assert main(["plan", "--model", str(tmp_path), "--context", "1000000"]) == 0
    out = capsys.readouterr().out
    lines = [re.split(r"   +", line.strip()) for line in out.splitlines()]
    assert [line[1:3] for line in lines if line[0].startswith("rows")] == [
        ["2", "262 KB"],
        ["21", "6.72 GB"],
        ["20", "165 MB"],
    ]
    assert rows(out)["all"] == ["43", "6.89 GB", "1.52 GB", "1.34 GB"]


def test_context_memory_has_a_line_for_each_kind_of_layer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "gemma-4-e2b", "--context", "100000", "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)
    assert sum(line["num_layers"] for line in memory["layers"]) == 35
    for name in ("held_bytes", "read_bytes"):
        assert sum(line[name] for line in memory["layers"]) == pytest.approx(memory[name])
    reading = [line for line in memory["layers"] if line["state"] == "what another layer keeps"]
    assert {(line["held_bytes"] > 0, line["read_bytes"] > 0) for line in reading} == {(False, True)}
