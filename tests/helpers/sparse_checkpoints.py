"""Tiny checkpoints whose queries choose blocks of tokens, and naive models of those that transformers has not.

The naive models are written from the definitions, one query and head at a time, in float64.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.helpers.checkpoint_sizes import SIZES
from tests.helpers.random_models import save

M3: dict[str, Any] = SIZES | {
    "head_dim": 16,
    "rotary_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    "intermediate_size": 24,
    "dense_intermediate_size": 48,
    "shared_intermediate_size": 16,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "swiglu_limit": 1.5,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_block_size": 4,
    "index_topk_blocks": 3,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
MOBA: dict[str, Any] = {"moba_chunk_size": 8, "moba_topk": 3}
NSA: dict[str, Any] = {
    "nsa_compress_length": 8,
    "nsa_compress_stride": 4,
    "nsa_compress_hidden": 24,
    "nsa_block_size": 8,
    "nsa_num_blocks": 4,
    "nsa_window": 10,
}


def save_tiny_minimax_m3(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A MiniMaxM3VLForCausalLM whose last two layers attend to three blocks of four tokens."""
    return save(path, transformers.MiniMaxM3VLTextConfig(**M3 | options), seed, dtype)


def save_published_minimax_m3(path: Path, **options: Any) -> Path:
    """The model of `save_tiny_minimax_m3` in the form of the published checkpoint."""
    save_tiny_minimax_m3(path, **options)
    text = json.loads((path / "config.json").read_text())
    sparse = [int(kind != "full_attention") for kind in text.pop("layer_types")]
    text["moe_layer_freq"] = [int(kind == "sparse") for kind in text.pop("mlp_layer_types")]
    names = {
        "sparse_num_index_heads": "index_n_heads",
        "sparse_index_dim": "index_head_dim",
        "sparse_block_size": "index_block_size",
        "sparse_topk_blocks": "index_topk_blocks",
        "sparse_local_block": "index_local_blocks",
    }
    text["sparse_attention_config"] = {theirs: text.pop(ours) for theirs, ours in names.items()} | {
        "use_sparse_attention": True,
        "sparse_attention_freq": sparse,
        "sparse_disable_index_value": sparse,
    }
    config = {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl",
        "vision_config": {"hidden_size": 16},
        "text_config": text | {"hidden_act": "swigluoai"},
        "eos_token_id": text["eos_token_id"],
    }
    (path / "config.json").write_text(json.dumps(config))
    tensors = dict[str, torch.Tensor]()
    for name, tensor in load_file(path / "model.safetensors").items():
        for theirs, part in _published(name, tensor):
            tensors[f"language_model.{theirs}"] = part.contiguous()
    tensors["vision_tower.vision_model.pre_layrnorm.weight"] = torch.ones(16)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _published(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for part in ("experts", "gate", "shared_experts"):
        name = name.replace(f".mlp.{part}.", f".block_sparse_moe.{part}.")
    name = name.replace(".gate.e_score", ".e_score").replace(".self_attn.indexer.", ".self_attn.index_")
    if name.endswith(".experts.down_proj"):
        for index, expert in enumerate(tensor):
            yield name.replace("down_proj", f"{index}.w2.weight"), expert
    elif name.endswith(".experts.gate_up_proj"):
        for index, expert in enumerate(tensor):
            for weight, half in zip(("w1", "w3"), expert.chunk(2), strict=True):
                yield name.replace("gate_up_proj", f"{index}.{weight}.weight"), half
    elif name.endswith(".gate_up_proj.weight"):
        for weight, half in zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True):
            yield name.replace("gate_up_proj", weight), half
    else:
        yield name, tensor


def save_tiny_moba(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A TandemMobaForCausalLM whose heads attend to three blocks of eight tokens."""
    own = {name: options.pop(name, value) for name, value in MOBA.items()}
    save(path, transformers.LlamaConfig(**SIZES | options), seed, dtype)
    return _become(path, "TandemMobaForCausalLM", "tandem_moba", own)


def save_tiny_nsa(path: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A TandemNsaForCausalLM whose keys are compressed by eight, every four tokens."""
    own = {name: options.pop(name, value) for name, value in NSA.items()}
    save(path, transformers.LlamaConfig(**SIZES | options), seed, dtype)
    _become(path, "TandemNsaForCausalLM", "tandem_nsa", own)
    config = json.loads((path / "config.json").read_text())
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    width, inner, length = config["head_dim"], own["nsa_compress_hidden"], own["nsa_compress_length"]
    tensors, rng = load_file(path / "model.safetensors"), torch.Generator().manual_seed(seed + 1)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.self_attn"
        shapes = {f"{prefix}.gate_proj.weight": (3 * heads, hidden)}
        for name in ("compress_k", "compress_v"):
            shapes[f"{prefix}.{name}.position"] = (length, width)
            shapes[f"{prefix}.{name}.up_proj.weight"] = (inner, length * width)
            shapes[f"{prefix}.{name}.down_proj.weight"] = (width, inner)
        tensors |= {
            name: (torch.randn(shape, generator=rng) * shape[1] ** -0.5).to(getattr(torch, dtype))
            for name, shape in shapes.items()
        }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _become(path: Path, architecture: str, model_type: str, keys: dict[str, Any]) -> Path:
    file = path / "config.json"
    config = json.loads(file.read_text()) | keys
    file.write_text(json.dumps(config | {"architectures": [architecture], "model_type": model_type}))
    return path


BLOCK_BUILDERS: dict[str, Callable[..., Path]] = {
    "minimax_m3": save_tiny_minimax_m3,
    "moba": save_tiny_moba,
    "nsa": save_tiny_nsa,
}
OWN_ARCHITECTURES = {"TandemMobaForCausalLM": "tandem_moba", "TandemNsaForCausalLM": "tandem_nsa"}
"""Architectures that transformers has not and nobody published a checkpoint of, and their kinds of model."""


class NaiveModel:
    """Llama with the attention of MoBA or NSA, of a checkpoint of theirs. `chosen` [layer][position][set]: the blocks
    of the last call; sets are heads, or KV heads.
    """

    def __init__(self, path: Path) -> None:
        self.config = json.loads((path / "config.json").read_text())
        self.tensors = {name: tensor.double() for name, tensor in load_file(path / "model.safetensors").items()}
        self.chosen: list[list[list[frozenset[int]]]] = []

    @torch.no_grad()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[num_tokens, vocab] float64"""
        self.chosen = []
        x = self.tensors["model.embed_tokens.weight"][token_ids]
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}"
            x = x + self._attention(prefix, self._norm(x, f"{prefix}.input_layernorm"))
            y = self._norm(x, f"{prefix}.post_attention_layernorm")
            gate, up = (self._linear(y, f"{prefix}.mlp.{name}_proj") for name in ("gate", "up"))
            x = x + self._linear(torch.nn.functional.silu(gate) * up, f"{prefix}.mlp.down_proj")
        return self._linear(self._norm(x, "model.norm"), "lm_head")

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        root = (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()
        normed: torch.Tensor = x / root * self.tensors[f"{name}.weight"]
        return normed

    def _attention(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        config, name = self.config, f"{prefix}.self_attn"
        heads, kv_heads, width = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        q, k = (_rotated(self._linear(x, f"{name}.{part}_proj").view(len(x), -1, width)) for part in "qk")
        v = self._linear(x, f"{name}.v_proj").view(len(x), -1, width)
        of_layer: list[list[frozenset[int]]] = []
        gates = self._linear(x, f"{name}.gate_proj").sigmoid() if "nsa_window" in config else None
        compressed = None if gates is None else [*self._compressed(name, k, v)]
        out = torch.zeros(len(x), heads, width, dtype=torch.float64)
        for position in range(len(x)):
            if gates is None:
                sets = [
                    self._by_means(q[position, head], k[:, head * kv_heads // heads], position) for head in range(heads)
                ]
            else:
                assert compressed is not None
                sets = self._by_weights(q[position], compressed, position)
            of_layer.append(sets)
            for head in range(heads):
                kv = head * kv_heads // heads
                own = sets[head * len(sets) // heads]
                size = config["nsa_block_size" if gates is not None else "moba_chunk_size"]
                seen = [t for block in sorted(own) for t in range(block * size, min((block + 1) * size, position + 1))]
                found = _attend(q[position, head], k[seen, kv], v[seen, kv])
                if gates is not None:
                    assert compressed is not None
                    closed = [(key[kv], value[kv]) for end, key, value in compressed if end <= position]
                    wide = torch.zeros(width, dtype=torch.float64)
                    if closed:
                        wide = _attend(q[position, head], *(torch.stack(rows) for rows in zip(*closed, strict=True)))
                    near = range(max(0, position - config["nsa_window"] + 1), position + 1)
                    local = _attend(q[position, head], k[near, kv], v[near, kv])
                    gate = gates[position].view(3, heads)[:, head]
                    found = gate[0] * wide + gate[1] * found + gate[2] * local
                out[position, head] = found
        self.chosen.append(of_layer)
        return self._linear(out.flatten(1), f"{name}.o_proj")

    def _by_means(self, query: torch.Tensor, keys: torch.Tensor, position: int) -> frozenset[int]:
        size, own = self.config["moba_chunk_size"], position // self.config["moba_chunk_size"]
        scores = [float(query @ keys[block * size : (block + 1) * size].mean(0)) for block in range(own)]
        best = sorted(range(own), key=lambda block: (-scores[block], block))
        return frozenset({own, *best[: self.config["moba_topk"] - 1]})

    def _by_weights(
        self, queries: torch.Tensor, compressed: list[tuple[int, torch.Tensor, torch.Tensor]], position: int
    ) -> list[frozenset[int]]:
        """One set for each KV head: the first block, the last two, and of the others those with most weight."""
        config = self.config
        kv_heads, size, stride = config["num_key_value_heads"], config["nsa_block_size"], config["nsa_compress_stride"]
        own, group = position // size, len(queries) // kv_heads
        closed = [(end, key) for end, key, _ in compressed if end <= position]
        sets = []
        for kv in range(kv_heads):
            scores = [0.0] * (own + 1)
            for head in range(kv * group, (kv + 1) * group):
                if closed:
                    keys = torch.stack([key[kv] for _, key in closed])
                    weights = (keys @ queries[head] * config["head_dim"] ** -0.5).softmax(0).tolist()
                    for (end, _), weight in zip(closed, weights, strict=True):
                        for first in range(end + 1 - config["nsa_compress_length"], end, stride):
                            scores[first // size] += weight
            fixed = {0, own, max(own - 1, 0)}
            scores = [float(round(score * 65536)) for score in scores]
            best = sorted({*range(own + 1)} - fixed, key=lambda block: (-scores[block], block))
            sets.append(frozenset({*fixed, *best[: config["nsa_num_blocks"] - len(fixed)]}))
        return sets

    def _compressed(
        self, name: str, k: torch.Tensor, v: torch.Tensor
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """The last position of each compressed key, the key and the value, both [num_kv_heads, head_dim]."""
        length, stride = self.config["nsa_compress_length"], self.config["nsa_compress_stride"]
        for first in range(0, len(k) - length + 1, stride):
            rows = []
            for cache, part in ((k, "compress_k"), (v, "compress_v")):
                own = [cache[first : first + length, head] for head in range(cache.shape[1])]
                flat = torch.stack([(each + self.tensors[f"{name}.{part}.position"]).flatten() for each in own])
                inner = torch.nn.functional.silu(self._linear(flat, f"{name}.{part}.up_proj"))
                rows.append(self._linear(inner, f"{name}.{part}.down_proj"))
            yield first + length - 1, rows[0], rows[1]


def _rotated(x: torch.Tensor, theta: float = 10000.0) -> torch.Tensor:
    """`x` [num_tokens, heads, head_dim], of Llama's default rotary embedding."""
    half = x.shape[2] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(len(x), dtype=torch.float64)[:, None] * frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    scores: torch.Tensor = keys @ query * len(query) ** -0.5
    return scores.softmax(0) @ values
