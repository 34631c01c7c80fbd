"""Directories that must not be served: each is refused, by class, naming the value and what would work."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.compute.torch.kernels import TorchKernels
from tandem.core.errors import CheckpointError, CorruptCheckpointError, UnsupportedCheckpointError
from tandem.core.memory import total_bytes
from tandem.models.loader import LoadedModel, load_model
from tests.helpers import checkpoints
from tests.helpers.empty_weights import empty_weights
from tests.helpers.hybrid_checkpoints import RECURRENT_BUILDERS


def load(path: Path, *, allow_pickle: bool = False) -> LoadedModel:
    return load_model(str(path), device=torch.device("cpu"), kernels=TorchKernels(), allow_pickle=allow_pickle)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return checkpoints.save_tiny_llama(tmp_path)


LINEAR_IN_THE_MIDDLE = ["full_attention", "linear_attention", "full_attention"]

ORIGINAL = {"original_max_position_embeddings": 32}

UNSUPPORTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "architecture": ("llama", {"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*LlamaForCausalLM"),
    "model type alone": ("llama", {"architectures": None, "model_type": "bert"}, "model_type='bert'"),
    "dynamic rope": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic.*yarn"),
    "rope key": ("llama", {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
    "partial rotary": ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    "nested partial rotary": ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    "nested rope in a flat family": ("qwen3", {"rope_parameters": {"full_attention": {"factor": 2}}}, "full_attention"),
    "flat rope in a nested family": ("gemma3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "factor"),
    "quantised": ("llama", {"quantization_config": {"quant_method": "aqlm"}}, "quantization_config.*aqlm.*gptq"),
    "activation": ("llama", {"hidden_act": "relu"}, 'hidden_act="relu".*silu'),
    "older name of a scaling, by gemma 3": (
        "gemma3",
        {"rope_parameters": ..., "rope_scaling": {"type": "linear", "factor": 2.0}},
        'type="linear".*rope_type',
    ),
    "older name of a scaling, by olmo 3": (
        "olmo3",
        {"rope_parameters": ..., "rope_scaling": {"type": "yarn", "factor": 2.0}},
        'type="yarn".*rope_type',
    ),
    "gemma activation": ("gemma3", {"hidden_activation": "gelu"}, 'hidden_activation="gelu"'),
    "llama window": ("llama", {"sliding_window": 128}, "sliding_window=128"),
    "bidirectional": ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    "gemma 4 bidirectional": ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention.*vision"),
    "layer type": ("qwen2", {"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "linear"),
    "mistral layer types": ("mistral", {"layer_types": LINEAR_IN_THE_MIDDLE}, "layer_types=.*linear.*full_"),
    "layer type of qwen 3 experts": ("qwen3_moe", {"layer_types": LINEAR_IN_THE_MIDDLE}, "layer_types=.*linear.*full_"),
    "layer type of mixtral": ("mixtral", {"layer_types": LINEAR_IN_THE_MIDDLE}, "layer_types=.*linear.*full_"),
    "layer type of gpt-oss": ("gpt_oss", {"layer_types": LINEAR_IN_THE_MIDDLE}, "layer_types=.*linear.*sliding_"),
    "layer type of glm 4": ("glm4_moe", {"layer_types": LINEAR_IN_THE_MIDDLE}, "layer_types=.*linear.*full_"),
    "layer type of minimax m2": ("minimax_m2", {"layer_types": LINEAR_IN_THE_MIDDLE}, "layer_types=.*linear.*full_"),
    "layer type of gemma 4": (
        "gemma4_moe",
        {"layer_types": ["linear_attention"] * 5},
        "layer_types=.*linear.*sliding_",
    ),
    "scores of glm 4": ("glm4_moe", {"scoring_func": "softmax"}, 'scoring_func="softmax".*sigmoid'),
    "scores of minimax m2": ("minimax_m2", {"scoring_func": "softmax"}, 'scoring_func="softmax".*sigmoid'),
    "encoder-decoder": ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder"),
    "float64": ("llama", {"dtype": "float64"}, 'dtype="float64".*bfloat16'),
    "extra bias": ("llama-biases", {"attention_bias": False}, "q_proj.bias.*no place"),
}

CORRUPT: dict[str, tuple[str, dict[str, Any], str]] = {
    "negative size": ("llama", {"hidden_size": -64}, "hidden_size.*-64"),
    "zero layers": ("llama", {"num_hidden_layers": 0}, "num_hidden_layers"),
    "absurd size": ("llama", {"hidden_size": 10**12}, "hidden_size.*1000000000000"),
    "absurd layers": ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
    "string for a number": ("llama", {"hidden_size": "64"}, "hidden_size"),
    "float for a count": ("llama", {"vocab_size": 199.5}, "vocab_size"),
    "boolean for a count": ("llama", {"num_attention_heads": True}, "num_attention_heads"),
    "null size": ("llama", {"hidden_size": None}, "hidden_size"),
    "missing size": ("llama", {"vocab_size": ...}, "vocab_size.*nothing"),
    "string for a flag": ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings"),
    "list for a string": ("llama", {"hidden_act": ["silu"]}, "hidden_act"),
    "not a number": ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    "infinite theta": ("llama", {"rope_parameters": {"rope_theta": float("inf")}}, "rope_theta"),
    "heads and kv heads": ("llama", {"num_key_value_heads": 3}, "num_key_value_heads.*divisor"),
    "heads and hidden": ("llama", {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": None}, "divisor"),
    "odd head": ("llama", {"head_dim": 15}, "head_dim.*even"),
    "rope factor missing": ("llama", {"rope_parameters": {"rope_type": "linear"}}, "factor"),
    "longrope without a length": ("llama", {"rope_scaling": {"type": "longrope"}}, "original_max_position_embeddings"),
    "longrope without lists": ("llama", {"rope_scaling": {"type": "su"} | ORIGINAL}, "short_factor.*8.*nothing"),
    "longrope with a short list": (
        "llama",
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 7} | ORIGINAL},
        "long_factor must be a list of 8 numbers",
    ),
    "llama3 factors": (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}},
        "high_freq_factor",
    ),
    "rope is a list": ("llama", {"rope_scaling": [1]}, "rope_scaling"),
    "end token": ("llama", {"eos_token_id": "</s>"}, "eos_token_id"),
    "layer types length": ("qwen2", {"layer_types": ["full_attention"]}, "layer_types"),
    "sliding without window": ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
    "zero window": ("mistral", {"sliding_window": 0}, "sliding_window"),
    "contradicting model type": ("llama", {"model_type": "qwen2"}, "model_type"),
    "nothing says what it is": ("llama", {"architectures": None, "model_type": None}, "neither"),
    "architectures is a string": ("llama", {"architectures": "LlamaForCausalLM"}, "architectures"),
    "other vocabulary": ("llama", {"vocab_size": 200}, r"\[199, 64\].*\[200, 64\]"),
    "more layers than tensors": ("llama", {"num_hidden_layers": 4}, "lacks model.layers.3"),
    "other per-layer vocabulary": ("gemma4", {"vocab_size_per_layer_input": 200}, r"\[199, 160\].*\[200, 160\]"),
    "more layers share state": ("gemma4", {"num_kv_shared_layers": 3}, "num_kv_shared_layers"),
    "more experts than tensors": ("mixtral", {"num_local_experts": 9}, r"lacks .*experts\.8\.w1.*download"),
    "absurdly many experts": ("mixtral", {"num_local_experts": 10**9}, r"num_local_experts.*\[1, 4096\].*1000000000"),
    "more chosen than there are": ("mixtral", {"num_experts_per_tok": 9}, r"num_experts_per_tok.*\[1, 8\].*9"),
    "none chosen": ("qwen3_moe", {"num_experts_per_tok": 0}, r"num_experts_per_tok.*\[1, 6\].*0"),
    "more chosen than there are, by gemma 4": ("gemma4_moe", {"top_k_experts": 6}, r"top_k_experts.*\[1, 5\].*6"),
    "more chosen than there are, by gpt-oss": ("gpt_oss", {"num_experts_per_tok": 6}, r"num_experts_per_tok.*\[1, 5\]"),
    "no expert": ("gemma4_moe", {"num_experts": 0}, r"num_experts.*\[1, 4096\].*0"),
    "a dense layer that there is not": ("qwen3_moe", {"mlp_only_layers": [3]}, r"mlp_only_layers.*\[0, 2\].*\[3\]"),
    "bias not in the file": ("llama", {"mlp_bias": True}, r"lacks model\.layers\.0\.mlp\..*bias"),
}


def _build(family: str, path: Path) -> Path:
    if family == "llama-biases":
        return checkpoints.save_tiny_llama(path, attention_bias=True)
    return (checkpoints.BUILDERS | checkpoints.EXPERT_BUILDERS | checkpoints.MORE_BUILDERS)[family](path)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_well_formed_but_not_served(name: str, tmp_path: Path) -> None:
    family, changes, message = UNSUPPORTED[name]
    path = checkpoints.edit_config(_build(family, tmp_path), **changes)
    with pytest.raises(UnsupportedCheckpointError, match=message):
        load(path)


@pytest.mark.parametrize("name", CORRUPT)
def test_contradictory_or_absurd(name: str, tmp_path: Path) -> None:
    family, changes, message = CORRUPT[name]
    path = checkpoints.edit_config(_build(family, tmp_path), **changes)
    with pytest.raises(CorruptCheckpointError, match=message):
        load(path)


HARMLESS: dict[str, Any] = {
    "pretraining_tp": 2,
    "use_cache": False,
    "_name_or_path": "somewhere",
    "temperature": 0.6,
    "id2label": {"0": "a"},
    "attention_dropout": 0.1,
    "rope_interleaved": False,
    "use_mrope": False,
    "sliding_window": None,
    "something_new": None,
    "rope_scaling": None,
}


UNREAD: dict[str, Any] = {
    "unk_token_id": 0,
    "_model_name_or_path": "somewhere",
    "residual_multiplier": 0.2,
    "final_logit_softcapping": 30.0,
    "num_experts": 8,
}


@pytest.mark.parametrize("key", UNREAD)
def test_keys_that_the_architecture_never_reads_are_warned_of(
    key: str, llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: published checkpoints were refused for `unk_token_id` or `_model_name_or_path`."""
    before = load(llama).spec
    caplog.clear()
    assert load(checkpoints.edit_config(llama, **{key: UNREAD[key]})).spec == before
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"{key}=" in caplog.text


@pytest.mark.parametrize("key", HARMLESS)
def test_keys_without_effect_are_accepted(key: str, llama: Path) -> None:
    before = load(llama).spec
    assert load(checkpoints.edit_config(llama, **{key: HARMLESS[key]})).spec == before


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _cut_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:50])


def _huge_header(path: Path) -> None:
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


def _garbage(path: Path) -> None:
    path.write_bytes(b"not a checkpoint at all")


def _empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES: list[Callable[[Path], None]] = [_truncate, _cut_header, _huge_header, _garbage, _empty]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_safetensors(damage: Callable[[Path], None], llama: Path) -> None:
    damage(llama / "model.safetensors")
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors is damaged"):
        load(llama)


@pytest.mark.parametrize("damage", [_truncate, _cut_header, _empty])
def test_damaged_pytorch_file(damage: Callable[[Path], None], llama: Path) -> None:
    _to_pytorch(llama, checkpoints.read_tensors(llama))
    damage(llama / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        load(llama, allow_pickle=True)


def _to_pytorch(path: Path, content: object) -> None:
    torch.save(content, path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()


class Trap:
    """A pickle that would create a file where it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


def test_code_in_a_pytorch_file_is_not_run(llama: Path, tmp_path: Path) -> None:
    _to_pytorch(llama, checkpoints.read_tensors(llama) | {"trap": Trap(tmp_path / "sprung")})
    with pytest.raises(UnsupportedCheckpointError, match="code in it is never run"):
        load(llama, allow_pickle=True)
    assert not (tmp_path / "sprung").exists()


def test_plain_pickle_is_not_run(llama: Path, tmp_path: Path) -> None:
    (llama / "model.safetensors").unlink()
    (llama / "pytorch_model.bin").write_bytes(pickle.dumps({"trap": Trap(tmp_path / "sprung")}))
    with pytest.raises(CheckpointError):
        load(llama, allow_pickle=True)
    assert not (tmp_path / "sprung").exists()


def test_pytorch_file_of_something_else(llama: Path) -> None:
    _to_pytorch(llama, {"state_dict": checkpoints.read_tensors(llama)})
    with pytest.raises(UnsupportedCheckpointError, match="not a dictionary of tensors"):
        load(llama, allow_pickle=True)


REFUSED = r"/{} is a pickle, .* convert it to safetensors, or allow pickles by --allow-pickle"


def test_pickles_are_refused_where_nobody_allowed_them(llama: Path) -> None:
    _to_pytorch(llama, checkpoints.read_tensors(llama))
    with pytest.raises(UnsupportedCheckpointError, match=REFUSED.format(r"pytorch_model\.bin")):
        load(llama)


def test_an_index_of_safetensors_cannot_bring_a_pickle_in(llama: Path) -> None:
    """Its shards are read by their names' endings, whatever the index is called."""
    tensors = checkpoints.read_tensors(llama)
    _to_pytorch(llama, tensors)
    (llama / "pytorch_model.bin").rename(llama / "shard.bin")
    index = {"weight_map": dict.fromkeys(tensors, "shard.bin")}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedCheckpointError, match=REFUSED.format(r"shard\.bin")):
        load(llama)


@pytest.mark.parametrize("content", ["{", "[]", "", '"llama"', "[" * 100_000])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_unreadable_json(file: str, content: str, llama: Path) -> None:
    (llama / file).write_text(content)
    with pytest.raises(CorruptCheckpointError, match=file):
        load(llama)


def test_binary_in_json(llama: Path) -> None:
    (llama / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CorruptCheckpointError, match=r"config\.json"):
        load(llama)


@pytest.mark.parametrize(
    "changes",
    [{"temperature": "hot"}, {"top_p": 2.0}, {"top_k": -1}, {"repetition_penalty": 1e-40}, {"eos_token_id": [True]}],
)
def test_wrong_generation_defaults(changes: dict[str, Any], llama: Path) -> None:
    with pytest.raises(CorruptCheckpointError, match=next(iter(changes))):
        load(checkpoints.edit_generation_config(llama, **changes))


def test_no_configuration(llama: Path) -> None:
    (llama / "config.json").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"config\.json cannot be read"):
        load(llama)


def test_no_weights(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "model.gguf")
    with pytest.raises(CheckpointError, match=r"has no weights.*model\.gguf"):
        load(llama)


def _write_index(path: Path, weight_map: object) -> Path:
    (path / "model.safetensors").rename(path / "part-1.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"model.norm.weight": "part-2.safetensors"}, r"part-2\.safetensors is missing"),
        ({"model.other.weight": "part-1.safetensors"}, "model.other.weight"),
        ({"model.norm.weight": "../part-1.safetensors"}, "file names in this directory"),
        ({"model.norm.weight": 1}, "file names in this directory"),
        ({}, "weight_map"),
        (["part-1.safetensors"], "weight_map"),
    ],
)
def test_wrong_index(weight_map: object, message: str, llama: Path) -> None:
    with pytest.raises(CorruptCheckpointError, match=message):
        load(_write_index(llama, weight_map))


def test_missing_tensor(llama: Path) -> None:
    tensors = checkpoints.read_tensors(llama)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    checkpoints.write_tensors(llama, tensors)
    with pytest.raises(CorruptCheckpointError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        load(llama)


def test_extra_tensor(llama: Path) -> None:
    checkpoints.write_tensors(llama, checkpoints.read_tensors(llama) | {"model.adapter.weight": torch.ones(2)})
    with pytest.raises(UnsupportedCheckpointError, match=r"model\.adapter\.weight"):
        load(llama)


def test_wrong_shape(llama: Path) -> None:
    tensors = checkpoints.read_tensors(llama)
    tensors["model.norm.weight"] = torch.ones(65)
    with pytest.raises(CorruptCheckpointError, match=r"model\.norm\.weight has shape \[65\].*\[64\]"):
        load(checkpoints.write_tensors(llama, tensors))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float64])
def test_stored_dtype(dtype: torch.dtype, llama: Path) -> None:
    tensors = checkpoints.read_tensors(llama)
    tensors["model.norm.weight"] = torch.ones(64).to(dtype)
    with pytest.raises(UnsupportedCheckpointError, match=r"model\.norm\.weight is stored as"):
        load(checkpoints.write_tensors(llama, tensors))


def test_same_parameter_under_two_names(tmp_path: Path) -> None:
    path = checkpoints.save_tiny_gemma3_conditional(tmp_path)
    tensors = checkpoints.read_tensors(path)
    twice = {"model.language_model.norm.weight": tensors["language_model.model.norm.weight"].clone()}
    with pytest.raises(CorruptCheckpointError, match=r"model\.norm\.weight twice"):
        load(checkpoints.write_tensors(path, tensors | twice))


def test_multimodal_with_a_bound_of_logits(tmp_path: Path) -> None:
    """Regression: transformers bounds the logits of Gemma 3's text model, not of the multimodal one."""
    path = checkpoints.save_tiny_gemma3_conditional(tmp_path)
    text = json.loads((path / "config.json").read_text())["text_config"]
    checkpoints.edit_config(path, text_config=text | {"final_logit_softcapping": 2.0})
    with pytest.raises(UnsupportedCheckpointError, match=r"final_logit_softcapping=2\.0"):
        load(path)


def test_multimodal_without_text_configuration(tmp_path: Path) -> None:
    path = checkpoints.save_tiny_gemma3_conditional(tmp_path)
    with pytest.raises(CorruptCheckpointError, match="text_config"):
        load(checkpoints.edit_config(path, text_config=None))


MIXTRAL = "model.layers.1.block_sparse_moe"
MAMBA = "model.layers.0.mamba"
INDEXER = "model.layers.1.self_attn.indexer"
GPT_OSS = "model.layers.2.mlp.experts"
PARTS: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], object], str]] = {
    "an indexer without its keys": (
        "deepseek_v32",
        lambda t: t.pop(f"{INDEXER}.wk.weight"),
        r"lacks model\.layers\.1\.self_attn\.indexer\.wk\.weight",
    ),
    "an indexer whose keys have no bias": (
        "deepseek_v32",
        lambda t: t.pop(f"{INDEXER}.k_norm.bias"),
        r"lacks model\.layers\.1\.self_attn\.indexer\.k_norm\.bias",
    ),
    "an indexer of fewer heads": (
        "deepseek_v32",
        lambda t: t.update({f"{INDEXER}.wq_b.weight": t[f"{INDEXER}.wq_b.weight"][:24].contiguous()}),
        r"indexer\.wq_b\.weight has shape \[24, 40\].*\[384, 40\].*download both again",
    ),
    "a recurrence of fewer heads": (
        "granite_hybrid",
        lambda t: t.update({f"{MAMBA}.A_log": t[f"{MAMBA}.A_log"][:7].contiguous()}),
        r"mamba\.A_log has shape \[7\].*\[8\]",
    ),
    "a convolution of fewer columns": (
        "granite_hybrid",
        lambda t: t.update({f"{MAMBA}.conv1d.weight": t[f"{MAMBA}.conv1d.weight"][:, :, 1:].contiguous()}),
        r"mamba\.conv1d\.weight has shape \[192, 1, 3\].*\[192, 1, 4\]",
    ),
    "a recurrence without its decay": (
        "kimi_linear",
        lambda t: t.pop("model.layers.0.self_attn.A_log"),
        r"lacks model\.layers\.0\.self_attn\.A_log",
    ),
    "an expert lacks a matrix": (
        "mixtral",
        lambda t: t.pop(f"{MIXTRAL}.experts.5.w2.weight"),
        r"lacks .*experts\.5\.w2",
    ),
    "no router": (
        "mixtral",
        lambda t: t.pop(f"{MIXTRAL}.gate.weight"),
        r"lacks model\.layers\.1\.block_sparse_moe\.gate",
    ),
    "an expert too many": (
        "mixtral",
        lambda t: t.update({f"{MIXTRAL}.experts.8.w1.weight": torch.zeros(64, 64)}),
        r"experts\.8\.w1.*no place.*download both again",
    ),
    "an expert of another width": (
        "mixtral",
        lambda t: t.update({f"{MIXTRAL}.experts.3.w1.weight": torch.zeros(48, 64)}),
        r"experts\.3\.w1\.weight has shape \[48, 64\].*\[64, 64\].*download both again",
    ),
    "a router for more experts": (
        "mixtral",
        lambda t: t.update({f"{MIXTRAL}.gate.weight": torch.zeros(9, 64)}),
        r"gate\.weight has shape \[9, 64\].*\[8, 64\]",
    ),
    "a correction for fewer experts": (
        "glm4_moe",
        lambda t: t.update({"model.layers.1.mlp.gate.e_score_correction_bias": torch.zeros(7)}),
        r"e_score_correction_bias has shape \[7\].*\[8\]",
    ),
    "a stack of fewer experts": (
        "gpt_oss",
        lambda t: t.update({f"{GPT_OSS}.gate_up_proj": t[f"{GPT_OSS}.gate_up_proj"][:4].contiguous()}),
        r"gate_up_proj has shape \[4, .*calls for entry 4, rows .*download both again",
    ),
    "a stack of more experts": (
        "gpt_oss",
        lambda t: t.update({f"{GPT_OSS}.down_proj": torch.cat([t[f"{GPT_OSS}.down_proj"]] * 2)}),
        r"down_proj has shape \[10, .*elements",
    ),
    "experts of integers": (
        "mixtral",
        lambda t: t.update({f"{MIXTRAL}.experts.3.w1.weight": torch.zeros(64, 64, dtype=torch.int8)}),
        r"experts\.3\.w1\.weight is stored as torch\.int8",
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_that_do_not_belong_to_the_configuration(name: str, tmp_path: Path) -> None:
    family, change, message = PARTS[name]
    path = (checkpoints.BUILDERS | checkpoints.EXPERT_BUILDERS | RECURRENT_BUILDERS)[family](tmp_path)
    tensors = checkpoints.read_tensors(path)
    change(tensors)
    checkpoints.write_tensors(path, tensors)
    with pytest.raises(CheckpointError, match=message):
        load(path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_larger_than_memory_are_refused_with_numbers(dtype: str, tmp_path: Path) -> None:
    """Mapped from a file they would load, and every token would then read the disk."""
    path = checkpoints.save_tiny_mixtral(tmp_path)
    num_bytes = sum(tensor.numel() for tensor in checkpoints.read_tensors(path).values()) * (
        4 if dtype == "float32" else 2
    )

    def load_into(memory_bytes: int) -> LoadedModel:
        device, kernels = torch.device("cpu"), TorchKernels()
        return load_model(str(path), dtype=dtype, device=device, kernels=kernels, memory_bytes=memory_bytes)

    load_into(num_bytes)
    message = (
        f"take {num_bytes / 1e9:.3g} GB in {dtype}, .* GB of them experts, and cpu has {(num_bytes - 1) / 1e9:.3g} GB"
    )
    with pytest.raises(CheckpointError, match=message):
        load_into(num_bytes - 1)


def test_a_tied_head_takes_no_memory(tmp_path: Path) -> None:
    path = checkpoints.save_tiny_llama(tmp_path, tie_word_embeddings=True)
    num_bytes = sum(tensor.nbytes for tensor in checkpoints.read_tensors(path).values())
    device, kernels = torch.device("cpu"), TorchKernels()
    load_model(str(path), device=device, kernels=kernels, memory_bytes=num_bytes)
    with pytest.raises(CheckpointError, match="GB of memory"):
        load_model(str(path), device=device, kernels=kernels, memory_bytes=num_bytes - 1)


def test_one_file_larger_than_memory_is_refused(tmp_path: Path) -> None:
    """Regression: it ended with a traceback. A configuration without a dtype is not enough to tell before."""
    size = 1 << 20
    num_experts = 1 + total_bytes() // (3 * 2 * 1024 * size)
    options = {"hidden_size": 1024, "intermediate_size": size, "num_hidden_layers": 1, "dtype": None}
    path = checkpoints.edit_config(
        checkpoints.save_tiny_mixtral(tmp_path), **options, num_local_experts=num_experts, num_experts_per_tok=1
    )
    empty_weights(path)
    kernels = TorchKernels()
    with pytest.raises(CheckpointError, match="memory"):
        load_model(str(path), device=torch.device("cpu"), kernels=kernels, memory_bytes=total_bytes())
