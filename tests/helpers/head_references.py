"""Heads computed naively: every guess from the whole text, without caches, by plain PyTorch and by transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from safetensors.torch import load_file
from torch.nn import functional
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

Seen = tuple[list[int], list[int]]
"""The tokens of a text, and the guess behind them."""


def mtp_guess(path: Path, token_ids: list[int], num_guesses: int) -> list[int]:
    """The first module's guesses behind `token_ids`, reused for all, by the layer of transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    model._keys_to_ignore_on_load_unexpected = _module_keys(model)
    if getattr(model.config, "mlp_layer_types", None):  # NOTE: transformers does not know the module of GLM-4.7-Flash
        model.config.num_mtp_layers, model.config.mtp_mlp_layer_types = 1, ["sparse"]
    module = MtpModel.from_pretrained(model)
    with torch.no_grad():
        hidden = model(torch.tensor([token_ids[:-1]]), output_hidden_states=True).hidden_states[-1]
        behind, guesses = token_ids[1:], []
        for _ in range(num_guesses):
            rows = module.forward_layer(
                0, hidden, torch.arange(len(behind))[None], None, input_ids=torch.tensor([behind])
            )
            guesses.append(int(model.lm_head(rows[0, -1]).argmax()))
            hidden = torch.cat((hidden, rows[:, -1:]), dim=1)
            behind = [*behind, guesses[-1]]
    return guesses


def generated_with_mtp(path: Path, token_ids: list[int], num_tokens: int) -> tuple[list[int], list[Seen]]:
    """The greedy answer of `generate(use_mtp=True)`, and what its module guessed behind which tokens."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    model._keys_to_ignore_on_load_unexpected = _module_keys(model)
    model.generation_config.eos_token_id = None
    seen: list[Seen] = []

    class Recorded(MTPCandidateGenerator):
        def get_candidates(self, input_ids: Any, *args: Any, **options: Any) -> Any:
            found = super().get_candidates(input_ids, *args, **options)
            tokens, whole = input_ids[0].tolist(), found[0][0].tolist()
            if len(whole) > len(tokens):  # NOTE: of the prompt nothing is known before the first step
                seen.append((tokens, whole[len(tokens) :]))
            return found

    prompt = torch.tensor([token_ids])
    with patch("transformers.generation.utils.MTPCandidateGenerator", Recorded):
        found = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=num_tokens, do_sample=False, use_mtp=True
        )
    answer: list[int] = found[0, len(token_ids) :].tolist()
    return answer, seen


def _module_keys(model: Any) -> list[str]:
    """NOTE: weights of modules are found by a pattern of the class, which holds the number of layers of DeepSeek-V3."""
    return [rf"model\.layers\.{model.config.num_hidden_layers}\..*"]


def delta_mtp_guess(path: Path, token_ids: list[int], num_guesses: int) -> list[int]:
    """Guesses of the module under `mtp.` behind `token_ids`, by the layer of transformers, which knows no such module
    of these families.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    stored = load_file(path / "model.safetensors")
    w = {name.removeprefix("mtp."): tensor.float() for name, tensor in stored.items() if name.startswith("mtp.")}
    like = model.model.layers[1]  # with attention
    layer = type(like)(model.config, 1)
    own = {name.removeprefix("layers.0."): tensor for name, tensor in w.items() if name.startswith("layers.0.")}
    if not isinstance(layer.mlp, type(model.model.layers[0].mlp)):
        layer.mlp = type(model.model.layers[0].mlp)(model.config)  # NOTE: that layer may have no experts; modules have
    layer.load_state_dict(_with_stacks(own, layer.state_dict()))
    layer.eval()
    eps = model.config.rms_norm_eps

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1 + w[f"{name}.weight"])

    with torch.no_grad():
        hidden = model(torch.tensor([token_ids[:-1]]), output_hidden_states=True).hidden_states[-1]
        behind, guesses = token_ids[1:], []
        for _ in range(num_guesses):
            embedded = norm(model.get_input_embeddings()(torch.tensor([behind])), "pre_fc_norm_embedding")
            x = torch.cat((embedded, norm(hidden, "pre_fc_norm_hidden")), dim=-1) @ w["fc.weight"].T
            positions, size = torch.arange(len(behind))[None], len(behind)
            mask = torch.full((size, size), float("-inf")).triu(1)[None, None]
            rotary = model.model.rotary_emb(x, positions)
            out = layer(x, position_embeddings=rotary, attention_mask=mask, position_ids=positions)
            rows = norm(out[0] if isinstance(out, tuple) else out, "norm")
            guesses.append(int(model.lm_head(rows[0, -1]).argmax()))
            hidden = torch.cat((hidden, rows[:, -1:]), dim=1)
            behind = [*behind, guesses[-1]]
    return guesses


def _with_stacks(own: dict[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same, with the tensors of single experts made into stacks where `wanted` has them so."""
    found = {name: tensor for name, tensor in own.items() if name in wanted}
    if set(found) == set(wanted):
        return found
    count = 1 + max(int(name.split(".")[2]) for name in own if name.startswith("mlp.experts."))
    parts = {
        part: [own[f"mlp.experts.{i}.{part}_proj.weight"] for i in range(count)] for part in ("gate", "up", "down")
    }
    pairs = zip(parts["gate"], parts["up"], strict=True)
    found["mlp.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
    found["mlp.experts.down_proj"] = torch.stack(parts["down"])
    return found


def eagle3_guess(path: Path, head: Path, token_ids: list[int], num_guesses: int) -> list[int]:
    """Guesses of the EAGLE-3 head at `head` behind `token_ids`, for the model at `path`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    config, stored = json.loads((head / "config.json").read_text()), load_file(head / "model.safetensors")
    w = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in stored.items()}
    embedding = w.get("embed_tokens.weight", model.state_dict()["model.embed_tokens.weight"])
    nested = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    layers = config.get("eagle_aux_hidden_state_layer_ids") if nested is None else [layer + 1 for layer in nested]
    with torch.no_grad():
        states = model(torch.tensor([token_ids[:-1]]), output_hidden_states=True).hidden_states
        hidden = torch.cat([states[layer][0] for layer in layers], dim=1) @ w["fc.weight"].T
        behind, guesses = token_ids[1:], []
        for _ in range(num_guesses):
            out = _eagle3_layer(config, w, embedding[torch.tensor(behind)], hidden)
            logits = w["lm_head.weight"] @ _norm(out[-1], w["norm.weight"], config)
            own = int(logits.argmax())
            guesses.append(own + int(w["d2t"][own]))
            hidden = torch.cat((hidden, out[-1:]))
            behind = [*behind, guesses[-1]]
    return guesses


def _eagle3_layer(
    config: dict[str, float], w: dict[str, torch.Tensor], embedded: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    """[num_rows, hidden] of the rows' embeddings and hidden states."""
    normed = _norm(hidden, w["midlayer.hidden_norm.weight"], config)
    x = torch.cat((_norm(embedded, w["midlayer.input_layernorm.weight"], config), normed), dim=1)
    num_rows, size = len(x), int(config["head_dim"])
    q, k, v = (
        (x @ w[f"midlayer.self_attn.{name}_proj.weight"].T).view(num_rows, -1, size).transpose(0, 1) for name in "qkv"
    )
    groups = len(q) // len(k)
    q, k = _rotated(q, config["rope_theta"]), _rotated(k, config["rope_theta"]).repeat_interleave(groups, 0)
    attended = functional.scaled_dot_product_attention(q, k, v.repeat_interleave(groups, 0), is_causal=True)
    mixed = attended.transpose(0, 1).reshape(num_rows, -1) @ w["midlayer.self_attn.o_proj.weight"].T
    residual = mixed + (normed if config.get("norm_before_residual") else hidden)
    y = _norm(residual, w["midlayer.post_attention_layernorm.weight"], config)
    gate, up, down = (w[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return residual + (functional.silu(y @ gate.T) * (y @ up.T)) @ down.T


def _norm(x: torch.Tensor, weight: torch.Tensor, config: dict[str, float]) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]) * weight


def _rotated(x: torch.Tensor, theta: float) -> torch.Tensor:
    """[heads, num_rows, size], half-split."""
    size = x.shape[-1]
    frequencies = theta ** -(torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(x.shape[1], dtype=torch.float32), frequencies)
    cos, sin = angles.cos(), angles.sin()
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
