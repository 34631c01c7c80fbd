"""Damaged and unknown checkpoints in published formats: refused by the names of tensor, key and value."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.compute.torch.kernels import TorchKernels
from tandem.compute.weights.rotations import RotatedWeight
from tandem.core.errors import CheckpointError, CorruptCheckpointError, UnsupportedCheckpointError
from tandem.models.heads.load import carries_mtp, load_mtp
from tandem.models.loader import LoadedModel, load_model
from tests.helpers import checkpoints
from tests.helpers.heads import save_deepseek_v3_with_mtp
from tests.helpers.published_formats import FORMATS, PER_TOKEN, compressed, floats, integers, save_published

SIZES = {"hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 1}
MODULE = "model.layers.0.self_attn.k_proj"
Tensors = dict[str, torch.Tensor]


def saved(path: Path, name: str, **options: Any) -> Path:
    """A small Llama in the format of that name."""
    plain = checkpoints.save_tiny_llama(path / "plain", **SIZES | options)
    save_published(plain, FORMATS[name], path / "coded", path / "decoded")
    return path / "coded"


def load(path: Path) -> LoadedModel:
    return load_model(str(path), dtype="float32", device=torch.device("cpu"), kernels=TorchKernels())


def without(suffix: str) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        del tensors[f"{MODULE}.{suffix}"]

    return edit


def changed(suffix: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        name = f"{MODULE}.{suffix}"
        tensors[name] = change(tensors[name].clone()).contiguous()

    return edit


def first_is(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return change


def shuffled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flip(0)


def cut(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:-1]


DAMAGED: dict[str, tuple[str, Callable[[Tensors], None], str]] = {
    "no scales of fp8": ("fp8 blocks", without("weight_scale_inv"), r"lacks .*k_proj\.weight_scale_inv.*download"),
    "no codes of int4": ("compressed int4 groups", without("weight_packed"), r"lacks .*k_proj\.weight_packed"),
    "no scales of int4": ("compressed int4 groups", without("weight_scale"), r"lacks .*k_proj\.weight_scale"),
    "no zero points": ("awq", without("qzeros"), r"lacks .*k_proj\.qzeros"),
    "no integers": ("gptq", without("qweight"), r"lacks .*k_proj\.qweight"),
    "no order": ("gptq 2 in an order", without("g_idx"), r"lacks .*k_proj\.g_idx"),
    "no whole scale": ("compressed nvfp4", without("weight_global_scale"), r"lacks .*k_proj\.weight_global_scale"),
    "no table": ("bitsandbytes nf4", without("weight.quant_map"), r"lacks .*k_proj\.weight\.quant_map"),
    "fp8 scales cut": ("fp8 channels", changed("weight_scale", cut), r"lacks .*weight_scale_inv"),
    "int4 scales cut": ("compressed int4 groups", changed("weight_scale", cut), r"weight_scale has shape \[95, 6\]"),
    "int4 codes cut": ("compressed int4 groups", changed("weight_packed", cut), r"weight_packed has shape \[95, 24\]"),
    "gptq cut": ("gptq", changed("qweight", cut), r"k_proj\.qweight has shape \[96, 23\].*\[96, 24\]"),
    "awq cut": ("awq", changed("qzeros", cut), r"k_proj\.qzeros has shape \[12, 2\].*\[12, 3\]"),
    "nf4 cut": ("bitsandbytes nf4", changed("weight", cut), r"k_proj\.weight has shape"),
    "scale of nothing": (
        "gptq",
        changed("scales", first_is(float("nan"))),
        r"k_proj\.scales has scales from nan to nan, positive numbers are expected; download",
    ),
    "scale of zero": ("awq", changed("scales", first_is(0.0)), r"k_proj\.scales has scales from 0 to"),
    "scale below zero": (
        "compressed int8 channels",
        changed("weight_scale", first_is(-1.0)),
        r"k_proj\.weight_scale has scales from -1 to",
    ),
    "scale without end": (
        "fp8 blocks",
        changed("weight_scale_inv", first_is(float("inf"))),
        r"k_proj\.weight_scale_inv has scales from .* to inf",
    ),
    "power of two without a number": (
        "compressed mxfp8",
        changed("weight_scale", first_is(255)),
        r"k_proj\.weight_scale has scales from nan",
    ),
    "whole scale of zero": (
        "compressed nvfp4",
        changed("weight_global_scale", first_is(0.0)),
        r"weight_global_scale has scales from 0 to 0",
    ),
    "group out of range": (
        "gptq 2 in an order",
        changed("g_idx", first_is(99)),
        r"k_proj\.g_idx has groups from 0 to 99, 6 of 32 inputs each are expected",
    ),
    "group below zero": ("compressed int4 in an order", changed("weight_g_idx", first_is(-1)), r"groups from -1 to 5"),
    "an order that is not said": ("gptq", changed("g_idx", shuffled), r"k_proj\.g_idx has groups.*desc_act=false"),
    "zero points that are not said": (
        "gptq",
        changed("qzeros", first_is(0)),
        r"k_proj\.qzeros has zero points from 1 to 8, .*sym=true.*checkpoint_format",
    ),
    "another shape said": (
        "compressed int4 groups",
        changed("weight_shape", first_is(5)),
        r"k_proj\.weight_shape says \[5, 192\], config\.json calls for \[96, 192\]",
    ),
    "codes of another dtype": (
        "compressed int4 groups",
        changed("weight_packed", lambda tensor: tensor.short()),
        r"k_proj\.weight_packed is stored as torch\.int16; supported: int32",
    ),
    "a state that is no JSON": (
        "bitsandbytes nf4",
        changed("weight.quant_state.bitsandbytes__nf4", first_is(0)),
        r"k_proj\.weight\.quant_state\.bitsandbytes__nf4 is no JSON",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_tensors_are_refused_by_name(case: str, tmp_path: Path) -> None:
    name, edit, message = DAMAGED[case]
    path = saved(tmp_path, name)
    tensors = checkpoints.read_tensors(path)
    edit(tensors)
    checkpoints.write_tensors(path, tensors)
    with pytest.raises(CheckpointError, match=message):
        load(path)


def rotated(location: str, target: str = "re:.*down_proj$", **changes: Any) -> dict[str, Any]:
    """A configuration with one rotation."""
    apply = [{"targets": [target], "location": location, "inverse": False, "ignore": []}]
    scheme = {"type": "hadamard", "apply": apply, "randomize": False, "head_dim": 64, **changes}
    return FORMATS["compressed int4 groups"].config | {"transform_config": {"config_groups": {"R4": scheme}}}


def edited(name: str, **changes: Any) -> dict[str, Any]:
    return {**FORMATS[name].config, **changes}


GPTQ, AWQ, FP8, INT4, NF4 = "gptq", "awq", "fp8 blocks", "compressed int4 groups", "bitsandbytes nf4"
STATIC = PER_TOKEN | {"dynamic": False}
UNSERVED: dict[str, tuple[str, dict[str, Any], str]] = {
    "method": (GPTQ, {"quant_method": "aqlm"}, 'quant_method="aqlm" is not served; supported: awq, bitsandbytes'),
    "no method": (GPTQ, {"bits": 4}, "quant_method=null is not served"),
    "bits of gptq": (GPTQ, edited(GPTQ, bits=5), "bits=5 is not served; supported: 2, 3, 4, 8"),
    "layout of gptq": (GPTQ, edited(GPTQ, checkpoint_format="marlin"), 'checkpoint_format="marlin".*gptq_v2'),
    "groups": (GPTQ, edited(GPTQ, group_size=24), "group_size=24 is not served; supported: groups of 8, 16, 32"),
    "layout of awq": (AWQ, edited(AWQ, version="gemv"), 'version="gemv" is not served; supported: gemm'),
    "bits of awq": (AWQ, edited(AWQ, bits=8), "bits=8 is not served; supported: 4"),
    "kind of fp8": (FP8, edited(FP8, fmt="e5m2"), 'fmt="e5m2" is not served; supported: e4m3'),
    "int4 experts": (FP8, edited(FP8, expert_dtype="int4"), 'expert_dtype="int4" is not served; supported: fp8, fp4'),
    "8 bits with outliers": (NF4, edited(NF4, load_in_8bit=True), "load_in_8bit=true is not served; supported: false"),
    "layout": (INT4, compressed("marlin-24", integers(4, "group", 32)), 'format="marlin-24".*pack-quantized'),
    "sparse": (INT4, edited(INT4, sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24-bitmask.*dense"),
    "rotated elsewhere": (INT4, rotated("residual"), 'location="residual" is not served; supported: weight_input'),
    "rotated keys alone": (INT4, rotated("k_cache", "re:.*self_attn$"), "k_cache and q_attn together"),
    "random rotations": (INT4, rotated("input", type="random-hadamard"), 'type="random-hadamard".*hadamard, of'),
    "shuffled rotations": (INT4, rotated("input", randomize=True), "randomize=true is not served"),
    "sizes of rotations": (INT4, rotated("input", head_dim=None), "R4 rotates 320 inputs of .*down_proj.* by 320"),
    "rotated nowhere": (
        INT4,
        rotated("input", "re:.*dwn_proj$"),
        r"R4 has the target 're:\.\*dwn_proj\$', which is none",
    ),
    "rotated attention": (INT4, rotated("input", "re:.*self_attn$"), "which is none of the linear maps of this model"),
    "rotated norms": (INT4, rotated("output", "re:.*input_layernorm$"), "which is none of the linear maps of this"),
    "rotated floats": (INT4, rotated("input", "re:lm_head$"), r"rotates lm_head\.weight, which is not coded"),
    "activations with fixed scales": (
        "compressed int8 channels",
        compressed("int-quantized", integers(8, "channel"), STATIC),
        "dynamic=false is not served; supported: true",
    ),
    "activations of groups": (
        "compressed int8 channels",
        compressed("int-quantized", integers(8, "group", 32), PER_TOKEN),
        'strategy="group" is not served; supported: channel, tensor: with integer activations',
    ),
    "mixed of modelopt": ("modelopt fp8", edited("modelopt fp8", quant_algo="W4A8_AWQ"), "W4A8_AWQ.*FP8, NVFP4"),
    "block of nvfp4": (
        "compressed nvfp4",
        compressed("nvfp4-pack-quantized", floats(4, "tensor_group", 32)),
        "group_size=32 is not served; supported: 16",
    ),
}


@pytest.mark.parametrize("case", UNSERVED)
def test_configurations_that_are_not_served_are_refused_by_name(case: str, tmp_path: Path) -> None:
    name, config, message = UNSERVED[case]
    path = checkpoints.edit_config(saved(tmp_path, name), quantization_config=config)
    with pytest.raises(UnsupportedCheckpointError, match=message):
        load(path)


def test_one_target_of_several_that_is_nowhere_is_refused(tmp_path: Path) -> None:
    config = rotated("input")
    config["transform_config"]["config_groups"]["R4"]["apply"][0]["targets"].append("model.layers.7.mlp.down_proj")
    path = checkpoints.edit_config(saved(tmp_path, INT4), quantization_config=config)
    with pytest.raises(UnsupportedCheckpointError, match=r"R4 has the target 'model\.layers\.7\.mlp\.down_proj'"):
        load(path)


def test_a_rotation_of_a_head_that_is_the_embedding_is_refused(tmp_path: Path) -> None:
    """It was ignored: the only name of such a head was the embedding's."""
    config = rotated("input", "lm_head")
    path = checkpoints.edit_config(saved(tmp_path, INT4, tie_word_embeddings=True), quantization_config=config)
    with pytest.raises(UnsupportedCheckpointError, match=r"rotates lm_head\.weight, which is not coded"):
        load(path)


@pytest.mark.parametrize("layer", [0, 2], ids=["of the model", "of the module"])
def test_a_rotation_of_the_model_or_of_its_module_for_further_tokens_alone_is_served(
    layer: int, tmp_path: Path
) -> None:
    """Each is loaded with a plan of its own, in which the other's targets are nowhere."""
    plain = save_deepseek_v3_with_mtp(tmp_path / "plain", hidden_size=64, v_head_dim=16)
    save_published(plain, FORMATS[INT4], tmp_path / "coded", tmp_path / "decoded")
    config = rotated("input", rf"re:model\.layers\.{layer}\.self_attn\.o_proj$")
    path = checkpoints.edit_config(tmp_path / "coded", quantization_config=config)
    model = load(path)
    weights = model.decoder.parameters.weights
    rotated_ones = [name for name, weight in weights.items() if isinstance(weight, RotatedWeight)]
    assert rotated_ones == ["model.layers.0.self_attn.o_proj.weight"] * (layer == 0)
    assert carries_mtp(path, model)
    assert load_mtp(path, model, kernels=TorchKernels(), device=torch.device("cpu")).weight_bytes > 0


CONTRADICTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no groups": (INT4, {"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups must be"),
    "blocks": (FP8, edited(FP8, weight_block_size=[128]), "weight_block_size must be two positive integers"),
    "pattern": (
        GPTQ,
        edited(GPTQ, dynamic={"+:(": {"bits": 8}}),
        r"\+:\( has '\(', no regular expression.*correct it",
    ),
    "another group size": (
        GPTQ,
        edited(GPTQ, group_size=64),
        r"_proj\.scales has shape \[(\d+), 6\].*\[\1, 3\]",
    ),
    "other bits": (GPTQ, edited(GPTQ, bits=8), r"_proj\.qweight has shape \[(\d+), 24\].*\[\1, 48\]"),
    "another bits of words": (
        INT4,
        compressed("pack-quantized", integers(8, "group", 32)),
        r"_proj\.weight_packed has shape \[(\d+), 24\].*\[\1, 48\]",
    ),
    "no scales of a target": (
        "compressed int4 groups",
        compressed("pack-quantized", integers(4, "group", 32)) | {"ignore": []},
        r"has a scheme for lm_head\.weight, whose scales are not stored; add it to `ignore`",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTED)
def test_configurations_that_tensors_contradict_are_refused_by_name(case: str, tmp_path: Path) -> None:
    name, config, message = CONTRADICTED[case]
    path = checkpoints.edit_config(saved(tmp_path, name), quantization_config=config)
    with pytest.raises(CorruptCheckpointError, match=message):
        load(path)


def test_rows_that_share_blocks_with_another_weight_are_refused(tmp_path: Path) -> None:
    """Two inputs of 96 do not fill blocks of 64."""
    path = saved(tmp_path, NF4)
    checkpoints.edit_config(path, hidden_size=96, num_attention_heads=2, num_key_value_heads=1)
    with pytest.raises(UnsupportedCheckpointError, match=r"has 96 inputs, .*multiples of 64 are served"):
        load(path)


def test_words_of_zero_points_that_two_projections_share_are_refused(tmp_path: Path) -> None:
    """A word has those of 8 outputs, and heads of 20 elements end within one."""
    plain = checkpoints.save_tiny_phi3(
        tmp_path / "plain", hidden_size=160, num_attention_heads=8, num_key_value_heads=1, num_hidden_layers=1
    )
    for name, zeros in (("awq", "qweight"), ("compressed int4 with zero points", "weight_zero_point")):
        save_published(plain, FORMATS[name], tmp_path / zeros, tmp_path / f"{zeros}_decoded")
        message = rf"qkv_proj\.{zeros} has one row for 8 outputs, and .*k_proj\.weight .*; serve a checkpoint that"
        with pytest.raises(UnsupportedCheckpointError, match=message):
            load(tmp_path / zeros)
