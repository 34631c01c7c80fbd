"""Builders of random heads beside tiny checkpoints: MTP modules inside them, EAGLE-3 directories of their own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.helpers.checkpoints import Builder, save_tiny_deepseek_v3, save_tiny_llama
from tests.helpers.delta_checkpoints import save_tiny_qwen3_next

WIDTH = 0.3  # of random weights


def save_with_mtp(build: Builder, path: Path, *, num_layers: int = 2, seed: int = 0, **options: Any) -> Path:
    """A checkpoint of `num_layers` layers and a module for multi-token prediction, which is a further layer with
    experts, saved as one more and then declared to be none.
    """
    build(path, seed=seed, num_hidden_layers=num_layers + 1, **options)
    config = json.loads((path / "config.json").read_text())
    config |= {"num_hidden_layers": num_layers, "num_nextn_predict_layers": 1}
    if "mlp_layer_types" in config:
        config["mlp_layer_types"] = config["mlp_layer_types"][:num_layers]
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    hidden, prefix = config["hidden_size"], f"model.layers.{num_layers}"
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{prefix}.{name}.weight"] = _norm(hidden, generator)
    tensors[f"{prefix}.eh_proj.weight"] = _matrix(hidden, 2 * hidden, generator)
    tensors[f"{prefix}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{prefix}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    dtype = tensors["model.embed_tokens.weight"].dtype
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


def save_delta_with_mtp(build: Builder, path: Path, *, seed: int = 0, **options: Any) -> Path:
    """A checkpoint of a family with the gated delta rule, and a module for multi-token prediction under `mtp.`: a
    further layer with attention, saved as one more and then declared to be none.
    """
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    layers = {"layer_types": [*kinds, "full_attention"], "num_hidden_layers": len(kinds) + 1}
    build(path, seed=seed, **layers | options)
    change_config(path, lambda config: config.update(layer_types=kinds, num_hidden_layers=len(kinds)))
    tensors, prefix = load_file(path / "model.safetensors"), f"model.layers.{len(kinds)}."
    further = {name: tensors.pop(name) for name in [*tensors] if name.startswith(prefix)}
    tensors |= {f"mtp.layers.0.{name.removeprefix(prefix)}": tensor for name, tensor in further.items()}
    generator = torch.Generator().manual_seed(seed)
    dtype, hidden = tensors["model.embed_tokens.weight"].dtype, tensors["model.embed_tokens.weight"].shape[1]
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{name}.weight"] = _norm(hidden, generator).sub(1).to(dtype)  # NOTE: 1 is added to these
    tensors["mtp.fc.weight"] = _matrix(hidden, 2 * hidden, generator).to(dtype)
    save_file(tensors, path / "model.safetensors")
    return path


def with_stacked_experts(path: Path) -> Path:
    """Makes stacks of the experts of the module under `mtp.` in the checkpoint at `path`."""
    tensors, prefix = load_file(path / "model.safetensors"), "mtp.layers.0.mlp.experts"
    count = sum(name.startswith(prefix) and name.endswith("gate_proj.weight") for name in tensors)
    gate, up, down = (
        [tensors.pop(f"{prefix}.{index}.{part}_proj.weight") for index in range(count)]
        for part in ("gate", "up", "down")
    )
    pairs = zip(gate, up, strict=True)
    tensors[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
    tensors[f"{prefix}.down_proj"] = torch.stack(down)
    save_file(tensors, path / "model.safetensors")
    return path


def save_eagle3(path: Path, model: Path, *, num_tokens: int = 80, seed: int = 0, **options: Any) -> Path:
    """A random EAGLE-3 head for the checkpoint `model`, which knows `num_tokens` of its tokens; `options` override
    keys of its configuration.
    """
    target = json.loads((model / "config.json").read_text())
    hidden, vocab = target["hidden_size"], target["vocab_size"]
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 72,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 1,
        "vocab_size": vocab,
        "draft_vocab_size": num_tokens,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    } | options
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(eagle3_tensors(config, target["hidden_size"], seed), path / "model.safetensors")
    return path


def save_llama_with_eagle3(path: Path, **options: Any) -> Path:
    """A LlamaForCausalLM, and a head for it in its directory `eagle`."""
    save_eagle3(path / "eagle", save_tiny_llama(path, **options))
    return path


def save_deepseek_v3_with_mtp(path: Path, **options: Any) -> Path:
    """A DeepseekV3ForCausalLM that carries a module for multi-token prediction."""
    return save_with_mtp(save_tiny_deepseek_v3, path, **options)


def save_qwen3_next_with_mtp(path: Path, **options: Any) -> Path:
    """A Qwen3NextForCausalLM that carries a module for multi-token prediction."""
    return save_delta_with_mtp(save_tiny_qwen3_next, path, **options)


HEAD_BUILDERS: dict[str, Builder] = {
    "llama_eagle": save_llama_with_eagle3,
    "deepseek_v3_mtp": save_deepseek_v3_with_mtp,
    "qwen3_next_mtp": save_qwen3_next_with_mtp,
}


def eagle3_tensors(config: dict[str, Any], target_hidden: int, seed: int) -> dict[str, torch.Tensor]:
    """Random tensors of a head in the published layout."""
    generator = torch.Generator().manual_seed(seed)
    hidden, wide, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    num_tokens = config["draft_vocab_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "fc": (hidden, 3 * target_hidden),
        "midlayer.self_attn.q_proj": (query, 2 * hidden),
        "midlayer.self_attn.k_proj": (key, 2 * hidden),
        "midlayer.self_attn.v_proj": (key, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, query),
        "midlayer.mlp.gate_proj": (wide, hidden),
        "midlayer.mlp.up_proj": (wide, hidden),
        "midlayer.mlp.down_proj": (hidden, wide),
        "lm_head": (num_tokens, hidden),
    }
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    tensors = {f"{name}.weight": _matrix(*shape, generator) for name, shape in shapes.items()}
    tensors |= {f"{name}.weight": _norm(hidden, generator) for name in norms}
    if hidden != target_hidden:
        tensors["embed_tokens.weight"] = _matrix(vocab, hidden, generator)
    known = torch.randperm(vocab, generator=generator)[:num_tokens].sort().values
    tensors["d2t"] = known - torch.arange(num_tokens)
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, known, True)
    return tensors


def change_config(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Edits the `config.json` at `path`."""
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))
    return path


def _norm(size: int, generator: torch.Generator) -> torch.Tensor:
    return 1 + 0.2 * torch.randn(size, generator=generator)


def _matrix(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    return WIDTH * torch.randn(rows, columns, generator=generator)
