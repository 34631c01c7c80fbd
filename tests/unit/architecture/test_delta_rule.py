"""Hybrids with the gated delta rule: options that are refused, layouts of their maps and experts in a checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.architecture.fields import Fields
from tandem.architecture.mixers import LatentAttentionSpec
from tandem.architecture.model import ModelSpec
from tandem.architecture.recurrent_mixers import LinearRecurrenceSpec
from tandem.architecture.registry import find_family
from tandem.compute.torch.kernels import TorchKernels
from tandem.core.errors import CorruptCheckpointError, UnsupportedCheckpointError
from tandem.models.loader import LoadedModel, load_model
from tests.helpers.checkpoints import read_tensors, write_tensors
from tests.helpers.delta_checkpoints import save_tiny_qwen3_5_conditional, save_tiny_qwen3_5_moe, save_tiny_qwen3_next
from tests.helpers.parameters import tensors_of
from tests.unit.architecture.published.deltas import DELTA

CONFIGS = {checkpoint.config["architectures"][0]: checkpoint.config for checkpoint in DELTA}
NEXT, DENSE, MIXTURE = "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"
KIMI = "KimiLinearForCausalLM"
WRAPPED = "Qwen3_5ForConditionalGeneration"


def read(name: str, **changes: Any) -> ModelSpec:
    fields = Fields({**CONFIGS[name], **changes}, "config.json")
    return find_family(fields).read_model(fields)


def load(path: Path) -> LoadedModel:
    return load_model(str(path), device=torch.device("cpu"), kernels=TorchKernels())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (NEXT, {"hidden_act": "gelu_pytorch_tanh"}),
        (NEXT, {"use_sliding_window": True}),
        (NEXT, {"layer_types": ["sliding_attention"] * 48}),
        (NEXT, {"number_of_conv_states": 2}),
        (DENSE, {"attn_output_gate": False}),
        (DENSE, {"output_gate_type": "sigmoid"}),
        (DENSE, {"mamba_ssm_dtype": "bfloat16"}),
        (DENSE, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
        (MIXTURE, {"norm_topk_prob": False}),
        (MIXTURE, {"mlp_only_layers": [3]}),
        (MIXTURE, {"decoder_sparse_step": 2}),
        (KIMI, {"mla_use_nope": False}),
        (KIMI, {"moe_router_activation_func": "softmax"}),
        (KIMI, {"use_grouped_topk": False}),
        (KIMI, {"mla_use_output_gate": True}),
        (KIMI, {"hidden_act": "situ"}),
    ],
)
def test_what_would_change_the_results_is_refused(name: str, changes: dict[str, Any]) -> None:
    key = "rope_type" if "rope_parameters" in changes else next(iter(changes))
    with pytest.raises(UnsupportedCheckpointError, match=f"{key}=.*supported"):
        read(name, **changes)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (NEXT, {"linear_num_key_heads": 12}, "linear_num_key_heads must be a divisor of linear_num_value_heads=32"),
        (NEXT, {"linear_conv_kernel_dim": 1}, r"linear_conv_kernel_dim must be an integer in \[2, 64\]"),
        (NEXT, {"layer_types": ["full_attention"]}, "layer_types must be a list of num_hidden_layers=48"),
        (KIMI, {"num_experts_per_token": 300}, r"num_experts_per_token must be an integer in \[1, 256\]"),
        (
            KIMI,
            {"num_experts_per_tok": 4},
            "num_experts_per_token must be num_experts_per_tok, which the file",
        ),
        (KIMI, {"linear_attn_config": {"kda_layers": [1], "full_attn_layers": [1]}}, "each of the layers 1 to 27 once"),
        (KIMI, {"mlp_layer_types": ["dense"]}, "mlp_layer_types must be a list of num_hidden_layers=27"),
        (WRAPPED, {"text_config": None}, "text_config must be an object"),
    ],
)
def test_contradictions_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=message):
        read(name, **changes)


def test_text_model_of_another_kind_is_refused() -> None:
    text = CONFIGS[WRAPPED]["text_config"] | {"model_type": "qwen3_5_moe_text"}
    with pytest.raises(UnsupportedCheckpointError, match=r'model_type="qwen3_5_moe_text".*supported: qwen3_5_text'):
        read(WRAPPED, text_config=text)


def test_kinds_of_layers_by_interval_and_by_name() -> None:
    assert read(DENSE) == read(DENSE, layer_types=None)
    half = read(DENSE, layer_types=None, full_attention_interval=2).layers
    assert [isinstance(layer.mixer, LinearRecurrenceSpec) for layer in half] == [True, False] * 32


def test_layers_of_kimi_are_counted_from_one() -> None:
    layers = read(KIMI).layers
    attending = [index for index, layer in enumerate(layers) if isinstance(layer.mixer, LatentAttentionSpec)]
    assert attending == [3, 7, 11, 15, 19, 23, 26]
    assert layers[0].routed is None
    assert layers == read(KIMI, mlp_layer_types=["dense", *["sparse"] * 26]).layers


def test_a_bound_of_the_decay_is_refused() -> None:
    """Kimi K3 has one, and its text model has the name of this one."""
    inner = CONFIGS[KIMI]["linear_attn_config"] | {"gate_lower_bound": -5.0}
    with pytest.raises(UnsupportedCheckpointError, match=r"linear_attn_config: gate_lower_bound=-5\.0: unknown here"):
        read(KIMI, linear_attn_config=inner)


def test_maps_that_are_stored_group_by_group(tmp_path: Path) -> None:
    """Of 2 groups with 2 heads each: rows of q, k, two of v, two of the gate."""
    path = save_tiny_qwen3_next(tmp_path)
    name = "model.layers.0.linear_attn"
    stored = read_tensors(path)[f"{name}.in_proj_qkvz.weight"].view(2, 16 + 16 + 24 + 24, 64)
    found = tensors_of(load(path).decoder)
    assert torch.equal(found[f"{name}.k.weight"], stored[:, 16:32].flatten(0, 1))
    assert torch.equal(found[f"{name}.v.weight"], stored[:, 32:56].flatten(0, 1))
    assert torch.equal(found[f"{name}.gate.weight"], stored[:, 56:].flatten(0, 1))


@pytest.mark.parametrize(("rows", "wanted"), [(159, "rows 0:16:1 of each 80"), (240, r"\[32, 64\]")])
def test_maps_of_another_shape_are_refused_by_name(rows: int, wanted: str, tmp_path: Path) -> None:
    path = save_tiny_qwen3_next(tmp_path)
    tensors = read_tensors(path)
    tensors["model.layers.0.linear_attn.in_proj_qkvz.weight"] = torch.ones(rows, 64)
    with pytest.raises(CorruptCheckpointError, match=rf"0\.linear_attn\.in_proj_qkvz\.weight has shape.*{wanted}"):
        load(write_tensors(path, tensors))


def test_experts_are_the_same_stored_as_stacks_and_one_by_one(tmp_path: Path) -> None:
    path = save_tiny_qwen3_5_moe(tmp_path)
    tensors, expected = read_tensors(path), tensors_of(load(path).decoder)
    expected = {name: tensor.clone() for name, tensor in expected.items()}
    for layer in range(3):
        prefix = next(name for name in tensors if f"layers.{layer}.mlp.experts.0.gate" in name).split(".experts")[0]
        parts = [
            {part: tensors.pop(f"{prefix}.experts.{expert}.{part}_proj.weight") for part in ("gate", "up", "down")}
            for expert in range(6)
        ]
        both = [torch.cat((part["gate"], part["up"])) for part in parts]
        tensors[f"{prefix}.experts.gate_up_proj"] = torch.stack(both)
        tensors[f"{prefix}.experts.down_proj"] = torch.stack([part["down"] for part in parts])
    found = tensors_of(load(write_tensors(path, tensors)).decoder)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_tensors_of_other_parts_are_left_where_they_are(tmp_path: Path) -> None:
    """A vision tower, and layers that predict further tokens."""
    path = save_tiny_qwen3_5_conditional(tmp_path)
    tensors = read_tensors(path)
    assert any("visual" in name for name in tensors)
    write_tensors(path, tensors | {"mtp.layers.0.self_attn.q_proj.weight": torch.ones(4, 4)})
    assert not any("visual" in name or "mtp" in name for name in tensors_of(load(path).decoder))
    write_tensors(path, tensors | {"further.layers.0.self_attn.q_proj.weight": torch.ones(4, 4)})
    with pytest.raises(UnsupportedCheckpointError, match=r"further\.layers\.0.*no place"):
        load(path)
