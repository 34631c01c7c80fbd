"""Whole runs on tiny checkpoints: what is written, what it is worth, what is refused, and going on after a stop."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tandem.compute.torch.kernels import TorchKernels
from tandem.core.errors import ConfigurationError, UnsupportedCheckpointError
from tandem.quantize.checkpoint_writer import INDEX, CheckpointWriter
from tandem.quantize.layer_rounding import LEAST_ROWS
from tandem.quantize.recipe import FormatName, Method, Recipe
from tandem.quantize.run import QuantizationRun
from tandem.quantize.source import SourceModel
from tests.helpers import checkpoints
from tests.helpers.delta_checkpoints import save_tiny_kimi_linear, save_tiny_qwen3_next
from tests.helpers.hybrid_checkpoints import save_tiny_granite_hybrid, save_tiny_lfm2_moe, save_tiny_nemotron_latent
from tests.helpers.quantizing import quantize_tiny, random_sequences
from tests.helpers.sparse_checkpoints import save_tiny_moba
from tests.helpers.tokenizers import write_byte_tokenizer

INT4 = Recipe("int4", "gptq", group_size=32)


def read_checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """All tensors, by the index."""
    places = json.loads((path / INDEX).read_text())["weight_map"]
    files = {name: load_file(path / name) for name in set(places.values())}
    assert places == {tensor: name for name, tensors in files.items() for tensor in tensors}
    return {tensor: files[name][tensor] for tensor, name in places.items()}


def run_of(path: Path, recipe: Recipe, on_layer: Callable[[int], None] = lambda num_done: None) -> QuantizationRun:
    source = SourceModel.open(path, TorchKernels())
    sequences = random_sequences(source.spec.vocab_size)
    return QuantizationRun("tiny", source, recipe, sequences, TorchKernels(), on_layer)


def test_what_is_not_coded_keeps_its_bits(tmp_path: Path) -> None:
    source = write_byte_tokenizer(checkpoints.save_tiny_qwen3(tmp_path / "qwen3", dtype="bfloat16"))
    report = quantize_tiny(source, tmp_path / "out", INT4)
    before, after = checkpoints.read_tensors(source), read_checkpoint(tmp_path / "out")
    coded = {name for name in before if name.startswith("model.layers.") and name.endswith("proj.weight")}
    assert len(coded) == 3 * 7
    for name in before.keys() - coded:
        assert torch.equal(before[name], after[name])
    assert {name for name in after if name.endswith("_packed")} == {f"{name}_packed" for name in coded}
    assert not coded & after.keys()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    scheme = config.pop("quantization_config")
    assert config == json.loads((source / "config.json").read_text())
    assert scheme["ignore"] == ["lm_head"]
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert report.bytes_after < report.bytes_before
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "mxfp4", "nvfp4"])
def test_all_formats_and_methods_stay_near_the_original(name: FormatName, method: Method, tmp_path: Path) -> None:
    """8 bits are ten times as near as 4."""
    source = checkpoints.save_tiny_llama(tmp_path / "llama", initializer_range=0.1)
    report = quantize_tiny(source, tmp_path / "out", Recipe(name, method, group_size=32 if name == "int4" else None))
    most = {"int8": 0.03, "fp8": 0.1}.get(name, 0.5)
    assert 0 < report.layers[-1].of_stream < most
    assert [layer.layer for layer in report.layers] == [0, 1, 2]
    assert 0 <= report.quality.kl_divergence < most


def test_gptq_is_nearer_than_rounding_to_the_nearest(tmp_path: Path) -> None:
    source = checkpoints.save_tiny_llama(tmp_path / "llama", initializer_range=0.1)
    divergence = {
        method: quantize_tiny(source, tmp_path / method, Recipe("int4", method, group_size=32)).quality.kl_divergence
        for method in ("rtn", "gptq")
    }
    assert divergence["gptq"] < 0.8 * divergence["rtn"]


@pytest.mark.parametrize(
    "build",
    [
        checkpoints.save_tiny_mixtral,
        checkpoints.save_tiny_phi3,
        checkpoints.save_tiny_gemma4,
        checkpoints.save_tiny_gemma3_conditional,
        save_tiny_qwen3_next,
        checkpoints.save_tiny_gpt_oss,
        pytest.param(save_tiny_nemotron_latent, marks=pytest.mark.slow),
        pytest.param(save_tiny_granite_hybrid, marks=pytest.mark.slow),
        pytest.param(save_tiny_kimi_linear, marks=pytest.mark.slow),
        pytest.param(checkpoints.save_tiny_gemma4_moe, marks=pytest.mark.slow),
    ],
    ids=[
        *("experts", "fused rows", "shared K and V", "text of several", "rows in turns", "stacks with biases"),
        *("experts behind a map", "stacks and a recurrence", "a map of two", "stacks in a branch"),
    ],
)
def test_families_of_other_forms(build: checkpoints.Builder, tmp_path: Path) -> None:
    report = quantize_tiny(build(tmp_path / "model"), tmp_path / "out", Recipe("int8", "gptq"))
    errors = [error for layer in report.layers for error in layer.weights]
    assert max(error.of_numbers for error in errors) < 0.02
    packed = [name for name in read_checkpoint(tmp_path / "out") if name.endswith("_packed")]
    assert 0 < len(packed) <= len(errors)


def test_layers_whose_queries_choose_blocks_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    source = save_tiny_moba(tmp_path / "moba")
    with pytest.raises(ConfigurationError, match=r"choose blocks of tokens, whose weights are not quantised"):
        quantize_tiny(source, tmp_path / "out", Recipe("int8", "rtn"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["moba"]


def test_states_steps_and_decays_are_left(tmp_path: Path) -> None:
    """Qwen3-Next has the maps to steps and decays in a tensor of their own."""
    source = save_tiny_qwen3_next(tmp_path / "model")
    quantize_tiny(source, tmp_path / "out", Recipe("int8", "gptq"))
    before, after = checkpoints.read_tensors(source), read_checkpoint(tmp_path / "out")
    prefix = "model.layers.0.linear_attn."
    left = {name.removeprefix(prefix) for name in after if name in before and name.startswith(prefix)}
    assert left == {"A_log", "dt_bias", "conv1d.weight", "in_proj_ba.weight", "norm.weight"}
    assert all(torch.equal(before[prefix + name], after[prefix + name]) for name in left)
    scheme = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert f"{prefix}in_proj_ba" in scheme["ignore"]


def test_experts_that_few_tokens_chose_are_rounded_to_the_nearest_and_named(tmp_path: Path) -> None:
    source = save_tiny_lfm2_moe(tmp_path / "model")
    report = quantize_tiny(source, tmp_path / "gptq", Recipe("int8", "gptq"))
    nearest = quantize_tiny(source, tmp_path / "rtn", Recipe("int8", "rtn"))
    seen = {error.name: error for layer in report.layers for error in layer.weights}
    few = {name for name, error in seen.items() if error.is_fallback}
    assert few == {name for name, error in seen.items() if error.num_rows is not None and error.num_rows < LEAST_ROWS}
    assert 0 < len(few) < len(seen)
    assert all(".experts." in name for name in few)
    text = (tmp_path / "gptq" / "quantization_report.txt").read_text()
    assert f"{len(few)} weights saw too few tokens" in text
    assert all(f"{seen[name].num_rows}  {name}" in text for name in few)
    assert not any(error.is_fallback for layer in nearest.layers for error in layer.weights)
    found, expected = read_checkpoint(tmp_path / "gptq"), read_checkpoint(tmp_path / "rtn")
    for name in few:
        assert torch.equal(found[f"{name}_packed"], expected[f"{name}_packed"]), "as if there were no calibration"


def test_fused_rows_are_one_stored_weight(tmp_path: Path) -> None:
    """Phi 3 stores q, k and v as one tensor, and so they are coded."""
    quantize_tiny(checkpoints.save_tiny_phi3(tmp_path / "model"), tmp_path / "out", INT4)
    packed = read_checkpoint(tmp_path / "out")["model.layers.0.self_attn.qkv_proj.weight_packed"]
    stored = checkpoints.read_tensors(tmp_path / "model")["model.layers.0.self_attn.qkv_proj.weight"]
    assert packed.shape == (stored.shape[0], stored.shape[1] // 8)


def test_a_rotated_checkpoint_has_a_head_of_its_own(tmp_path: Path) -> None:
    source = checkpoints.save_tiny_llama(tmp_path / "llama", tie_word_embeddings=True, initializer_range=0.1)
    report = quantize_tiny(source, tmp_path / "out", replace(INT4, format="int8", group_size=None, rotate=True))
    assert report.quality.kl_divergence < 0.01
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    after = read_checkpoint(tmp_path / "out")
    assert after["lm_head.weight"].shape == after["model.embed_tokens.weight"].shape
    assert torch.equal(after["model.norm.weight"], torch.ones(64))


def test_a_run_that_was_stopped_goes_on(tmp_path: Path) -> None:
    """Only the layers that are missing are computed, and the files are the same."""
    source = checkpoints.save_tiny_llama(tmp_path / "llama")
    whole = quantize_tiny(source, tmp_path / "whole", INT4)

    def stop(num_done: int) -> None:
        if num_done == 2:
            raise InterruptedError

    run = run_of(source, INT4, stop)
    writer = CheckpointWriter(tmp_path / "again", run.identity())
    with pytest.raises(InterruptedError):
        run.write(writer)
    kept = writer.layer_file(1).stat().st_ino
    run = run_of(source, INT4)
    assert run.write(CheckpointWriter(tmp_path / "again", run.identity())) == whole
    assert (tmp_path / "again" / writer.layer_file(1).name).stat().st_ino == kept
    found, wanted = (
        {path.name: path.read_bytes() for path in out.iterdir()} for out in (tmp_path / "again", tmp_path / "whole")
    )
    assert found == wanted


def test_files_of_another_run_are_refused(tmp_path: Path) -> None:
    source = checkpoints.save_tiny_llama(tmp_path / "llama")
    CheckpointWriter(tmp_path / "out", run_of(source, INT4).identity())
    other = run_of(source, replace(INT4, method="awq"))
    with pytest.raises(ConfigurationError, match=r"out\.partial is of a run with other settings.*delete it, or name"):
        CheckpointWriter(tmp_path / "out", other.identity())


def test_files_of_an_unknown_run_are_refused(tmp_path: Path) -> None:
    """The record of their run is missing, so they may be of any."""
    source = checkpoints.save_tiny_llama(tmp_path / "llama")
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "model-layer-00000.safetensors").write_bytes(b"")
    with pytest.raises(ConfigurationError, match=r"out\.partial is of a run with other settings"):
        CheckpointWriter(tmp_path / "out", run_of(source, INT4).identity())


def test_a_directory_with_files_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    with pytest.raises(ConfigurationError, match=r"--out=.*full exists and is not an empty directory; name another"):
        CheckpointWriter(tmp_path / "full", {})
    (tmp_path / "empty").mkdir()
    source = checkpoints.save_tiny_llama(tmp_path / "llama")
    quantize_tiny(source, tmp_path / "empty", Recipe("fp8", "rtn"))
    assert read_checkpoint(tmp_path / "empty")


def test_coded_checkpoints_are_refused(tmp_path: Path) -> None:
    quantize_tiny(checkpoints.save_tiny_llama(tmp_path / "llama"), tmp_path / "out", Recipe("int8", "rtn"))
    with pytest.raises(UnsupportedCheckpointError, match=r"--model=.*out: .* has quantization_config, so its weights"):
        SourceModel.open(tmp_path / "out", TorchKernels())


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (
            Recipe("int4", "rtn", group_size=64),
            r"mlp\.down_proj has 96 inputs, which groups of 64 do not divide; give --group-size=32, or a smaller",
        ),
        (
            Recipe("int4", "rtn", group_size=24),
            r"--group-size=24: give 0, one scale for each output, or a power of two",
        ),
        (Recipe("nvfp4", "rtn", group_size=32), r"--group-size=32: groups of nvfp4 are of one size; leave it out"),
    ],
)
def test_recipes_that_do_not_suit_the_model(recipe: Recipe, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        run_of(checkpoints.save_tiny_llama(tmp_path), recipe)


def test_inputs_that_blocks_of_a_format_do_not_divide(tmp_path: Path) -> None:
    source = checkpoints.save_tiny_llama(tmp_path, intermediate_size=88)
    with pytest.raises(ConfigurationError, match=r"88 inputs, which groups of 32 do not divide; use int4, int8 or fp8"):
        run_of(source, Recipe("mxfp4", "rtn"))


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    source = checkpoints.save_tiny_llama(tmp_path / "llama")
    tensors = checkpoints.read_tensors(source)
    tensors["model.layers.0.mlp.up_proj.weight"][3, 4] = torch.nan
    checkpoints.write_tensors(source, tensors)
    with pytest.raises(UnsupportedCheckpointError, match=r"layers\.0\.mlp\.up_proj\.weight has numbers that are not"):
        quantize_tiny(source, tmp_path / "out", Recipe("int8", "rtn"))


def test_the_report_says_what_happened(tmp_path: Path) -> None:
    source = checkpoints.save_tiny_llama(tmp_path / "llama")
    report = quantize_tiny(source, tmp_path / "out", INT4)
    text = (tmp_path / "out" / "quantization_report.txt").read_text()
    assert text == report.as_text()
    assert text.startswith("tiny: int4 by gptq, groups of 32\n")
    assert "top-1 agreement" in text
    assert text.count("█") > 3
    figures = json.loads((tmp_path / "out" / "quantization_report.json").read_text())
    weights = [error["name"] for layer in figures["layers"] for error in layer["weights"]]
    assert len(weights) == 21
    assert all(0 < error["of_outputs"] < 1 for layer in figures["layers"] for error in layer["weights"])
    assert figures["num_calibration_tokens"] == 12 * 24
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")]
    assert figures["bytes_after"] == sum(sizes)
