"""A GGUF file's directory is the one it was made of: same configuration, same weights, same tokenizer."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.architecture.model import ModelSpec
from tandem.architecture.rope import Llama3Scaling
from tandem.cli.model_cost import named_model
from tandem.compute.torch.kernels import TorchKernels
from tandem.core.errors import CheckpointError, CorruptCheckpointError, UnsupportedCheckpointError
from tandem.models.generation import read_generation_config
from tandem.models.gguf.convert import converted
from tandem.models.gguf.file import GgufFile
from tandem.models.hub import resolve_model_path, served_name
from tandem.models.loader import load_model
from tandem.text.chat_template import ChatTemplate
from tandem.text.tokenizer import Tokenizer
from tests.helpers.checkpoints import (
    save_tiny_deepseek_v2,
    save_tiny_deepseek_v3,
    save_tiny_gemma2,
    save_tiny_gemma3,
    save_tiny_glm4_moe,
    save_tiny_granite,
    save_tiny_llama,
    save_tiny_minimax_m2,
    save_tiny_mixtral,
    save_tiny_olmo2,
    save_tiny_phi3,
    save_tiny_qwen2,
    save_tiny_qwen2_moe,
    save_tiny_qwen3,
    save_tiny_qwen3_moe,
    save_tiny_smollm3,
)
from tests.helpers.gguf_files import write_gguf
from tests.helpers.hybrid_checkpoints import save_tiny_lfm2

LLAMA3_ROPE: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "max_position_embeddings": 131072,
    "head_dim": 64,
}
LONG_ROPE: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.25, 1.5, 2.0, 3.0, 4.0],
        "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
        "original_max_position_embeddings": 256,
    }
}
YARN: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.7,
        "original_max_position_embeddings": 32,
    }
}
ALONE: dict[str, Any] = {"n_group": 1, "topk_group": 1}
IN_GROUPS: dict[str, Any] = {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy", "q_lora_rank": 24}


def _save_gemma3(path: Path, **options: Any) -> Path:
    return _with_round_norms(
        save_tiny_gemma3(path, num_hidden_layers=7, layer_types=None, query_pre_attn_scalar=16, **options)
    )


def _save_gemma2(path: Path, **options: Any) -> Path:
    """Saves a tiny Gemma 2, whose head is always its embedding."""
    fixed: dict[str, Any] = {"query_pre_attn_scalar": 16, "tie_word_embeddings": True}
    return _with_round_norms(save_tiny_gemma2(path, **options | fixed))


def _with_round_norms(path: Path) -> Path:
    """Numbers of norms to which 1 can be added and taken away again."""
    tensors = load_file(path / "model.safetensors")
    rounded = {
        name: (x * 1024).round() / 1024 + 0.0 if name.endswith("norm.weight") else x for name, x in tensors.items()
    }
    save_file(rounded, path / "model.safetensors", metadata={"format": "pt"})
    return path


SAVERS: dict[str, list[Callable[..., Path]]] = {
    "llama": [save_tiny_llama, save_tiny_mixtral],
    "qwen2": [save_tiny_qwen2],
    "qwen3": [save_tiny_qwen3],
    "qwen2moe": [save_tiny_qwen2_moe],
    "qwen3moe": [partial(save_tiny_qwen3_moe, mlp_only_layers=[])],
    "gemma2": [_save_gemma2],
    "gemma3": [_save_gemma3],
    "phi3": [save_tiny_phi3, partial(save_tiny_phi3, sliding_window=12, max_position_embeddings=512, **LONG_ROPE)],
    "granite": [save_tiny_granite],
    "olmo2": [save_tiny_olmo2],
    "lfm2": [save_tiny_lfm2],
    "deepseek2": [
        partial(save_tiny_deepseek_v2, **ALONE | YARN),
        partial(save_tiny_deepseek_v2, **IN_GROUPS | YARN),
        partial(save_tiny_deepseek_v3, **YARN),
    ],
    "glm4moe": [save_tiny_glm4_moe],
    "minimax-m2": [save_tiny_minimax_m2],
    "smollm3": [partial(save_tiny_smollm3, num_hidden_layers=4, no_rope_layer_interval=4)],
}
"""Checkpoints of each architecture of GGUF; that of gpt-oss has other tensors, see `test_gpt_oss`."""


def spec_of(path: Path) -> ModelSpec:
    return load_model(str(path), device=torch.device("cpu"), kernels=TorchKernels()).spec


@pytest.mark.parametrize("save", [save for savers in SAVERS.values() for save in savers])
@pytest.mark.parametrize("tied", [False, True])
def test_every_family_comes_back_with_the_same_fingerprint(
    tmp_path: Path, save: Callable[..., Path], tied: bool
) -> None:
    """The fingerprint covers what shapes the result: configuration and weights."""
    checkpoint = save(tmp_path / "tiny", tie_word_embeddings=tied)
    rope = json.loads((checkpoint / "config.json").read_text())["rope_parameters"]
    factors = {f"rope_factors_{name}.weight": rope.get(f"{name}_factor") for name in ("short", "long")}
    extra = {name: np.array(values, np.float32) for name, values in factors.items() if values}
    file = write_gguf(checkpoint, tmp_path / "a.gguf", extra=extra)
    made = converted(file, tmp_path / "cache", decoded_to="float32")
    assert spec_of(made) == spec_of(checkpoint)
    tensors, expected = load_file(made / "model.safetensors"), load_file(checkpoint / "model.safetensors")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_recommended_sampling_is_added_where_the_file_has_none(tmp_path: Path) -> None:
    file = write_gguf(save_tiny_llama(tmp_path / "tiny"), tmp_path / "a.gguf")
    plain = converted(file, tmp_path / "cache")
    advised = converted(file, tmp_path / "cache", sampling={"temperature": 0.2})
    assert read_generation_config(plain).defaults == {}
    assert read_generation_config(advised).defaults == {"temperature": 0.2}


def test_biases_of_llama_are_reordered_with_their_rows(tmp_path: Path) -> None:
    checkpoint = save_tiny_llama(tmp_path / "tiny", attention_bias=True)
    tensors = load_file(checkpoint / "model.safetensors")
    for name in tensors:
        if name.endswith(".bias"):
            tensors[name] = torch.randn(tensors[name].shape)
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    made = converted(write_gguf(checkpoint, tmp_path / "a.gguf"), tmp_path / "cache", decoded_to="float32")
    assert spec_of(made) == spec_of(checkpoint)


def test_floats_stay_what_they_are_unless_a_dtype_is_asked_for(tmp_path: Path) -> None:
    file = write_gguf(save_tiny_llama(tmp_path / "tiny"), tmp_path / "a.gguf", type_name="F16")
    cases = ((None, {torch.float16, torch.float32}), ("bfloat16", {torch.bfloat16}), ("float32", {torch.float32}))
    for dtype, expected in cases:
        tensors = load_file(converted(file, tmp_path / "cache", decoded_to=dtype) / "model.safetensors")
        assert {tensor.dtype for tensor in tensors.values()} == expected


def test_codes_take_the_bytes_that_they_have_in_the_file(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": True}
    file = write_gguf(save_tiny_llama(tmp_path / "tiny", **sizes), tmp_path / "a.gguf", type_name="Q4_1")
    made = converted(file, tmp_path / "cache")
    with GgufFile(file) as source:
        coded = [entry.num_bytes for entry in source.tensors.values() if entry.type_name == "Q4_1"]
    stored = load_file(made / "model.safetensors").values()
    assert sorted(tensor.nbytes for tensor in stored if tensor.dtype == torch.uint8) == sorted(coded)
    config = json.loads((made / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "gguf"
    assert len(config["tensors"]["Q4_1"]) == len(coded)
    assert named_model(str(file), None, 16).weight_bits == pytest.approx(5.0, rel=0.1), "and the ends of cache lines"


def test_llama3_scaling_is_found_in_its_frequencies(tmp_path: Path) -> None:
    checkpoint = save_tiny_llama(tmp_path / "tiny", **LLAMA3_ROPE)
    made = converted(
        write_gguf(checkpoint, tmp_path / "a.gguf", extra={"rope_freqs.weight": frequencies()}),
        tmp_path / "cache",
        decoded_to="float32",
    )
    spec = spec_of(made)
    assert spec == spec_of(checkpoint)
    rope = spec.layers[0].mixer.rope
    assert rope is not None
    assert rope.scaling == Llama3Scaling(32.0, 1.0, 4.0, 8192)


def frequencies() -> np.ndarray[Any, np.dtype[np.float32]]:
    """Of `LLAMA3_ROPE`, as llama.cpp's converter computes them, one after another."""
    scaling = LLAMA3_ROPE["rope_parameters"]
    found = []
    for exponent in np.arange(0, 64, 2) / 64:
        wavelength = 2 * np.pi * scaling["rope_theta"] ** exponent
        if wavelength < 8192 / 4:
            found.append(1.0)
        elif wavelength > 8192:
            found.append(scaling["factor"])
        else:
            smooth = (8192 / wavelength - 1) / 3
            found.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(found, np.float32)


def test_other_frequencies_are_refused(tmp_path: Path) -> None:
    checkpoint = save_tiny_llama(tmp_path / "tiny", head_dim=64)
    odd = np.linspace(1, 9, 32, dtype=np.float32)
    file = write_gguf(checkpoint, tmp_path / "a.gguf", extra={"rope_freqs.weight": odd})
    with pytest.raises(UnsupportedCheckpointError, match=r"rope_freqs\.weight is not Llama 3.1's scaling by 9"):
        converted(file, tmp_path / "cache")


def test_text_and_sampling_come_along(tmp_path: Path) -> None:
    template = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
    file = write_gguf(
        save_tiny_llama(tmp_path / "tiny"),
        tmp_path / "a.gguf",
        tokenizer__chat_template=template,
        tokenizer__ggml__add_bos_token=True,
        tokenizer__ggml__eot_token_id=7,
        general__sampling__temp=0.5,
    )
    made = converted(file, tmp_path / "cache")
    tokenizer = Tokenizer.load(made)
    joined = tokenizer.token_id("ab")
    assert tokenizer.encode("xab", add_special_tokens=False) == [tokenizer.token_id("x"), joined]
    assert tokenizer.encode("ab") == [1, joined]
    assert tokenizer.eos_token_id == 2
    assert ChatTemplate.load(made).render([{"role": "user", "content": "hi"}]) == "<hi>"
    generation = json.loads((made / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [2, 7], "temperature": 0.5}


def test_sampling_that_is_not_applied_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Regression: such keys of a file were left out without a word."""
    sampling: dict[str, Any] = {"general__sampling__mirostat": 2, "general__sampling__xtc_probability": 0.0}
    file = write_gguf(save_tiny_llama(tmp_path / "tiny"), tmp_path / "a.gguf", general__sampling__top_k=3, **sampling)
    converted(file, tmp_path / "cache")
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [warning.split(": ")[1] for warning in warnings] == ["general.sampling.mirostat=2"]


def test_named_chat_templates_come_along(tmp_path: Path) -> None:
    """Regression: only the default was read, so that tools were left out of prompts without a word."""
    file = write_gguf(
        save_tiny_llama(tmp_path / "tiny"),
        tmp_path / "a.gguf",
        tokenizer__chat_template="plain",
        tokenizer__chat_templates=["rag", "tool_use"],
        tokenizer__chat_template__rag="documents",
        tokenizer__chat_template__tool_use="with {{ tools | length }}",
    )
    template = ChatTemplate.load(converted(file, tmp_path / "cache"))
    question = [{"role": "user", "content": "hi"}]
    assert template.render(question) == "plain"
    assert template.render(question, tools=[{"type": "function", "function": {"name": "look"}}]) == "with 1"


@pytest.mark.parametrize(
    "values",
    [
        {"tokenizer__chat_template": 5},
        {"tokenizer__chat_templates": ["tool_use"]},
        {"tokenizer__chat_templates": ["tool_use"], "tokenizer__chat_template__tool_use": 5},
        {"tokenizer__chat_templates": 5},
    ],
    ids=str,
)
def test_chat_templates_that_are_no_texts_are_refused(values: dict[str, Any], tmp_path: Path) -> None:
    file = write_gguf(save_tiny_llama(tmp_path / "tiny"), tmp_path / "a.gguf", **values)
    with pytest.raises(CorruptCheckpointError, match=r"tokenizer\.chat_template[.\w]* is no text"):
        converted(file, tmp_path / "cache")


def test_a_family_knows_the_tokens_that_end_an_answer(tmp_path: Path) -> None:
    tokens = ["<pad>", "<bos>", "<eos>", "<end_of_turn>", *(chr(0x100 + index) for index in range(195))]
    file = write_gguf(_save_gemma3(tmp_path / "tiny"), tmp_path / "a.gguf", **_vocabulary(tokens))
    generation = json.loads((converted(file, tmp_path / "cache") / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [2, 3]}


def _vocabulary(tokens: list[str]) -> dict[str, Any]:
    return {
        "tokenizer__ggml__model": "llama",
        "tokenizer__ggml__tokens": tokens,
        "tokenizer__ggml__scores": [-float(index) for index in range(len(tokens))],
        "tokenizer__ggml__merges": None,
    }


def test_it_is_made_once_for_each_content(tmp_path: Path) -> None:
    file = write_gguf(save_tiny_llama(tmp_path / "tiny"), tmp_path / "a.gguf")
    made = converted(file, tmp_path / "cache")
    written = (made / "model.safetensors").stat().st_mtime_ns
    os.utime(made, (0, 0))
    moved = file.rename(tmp_path / "b.gguf")
    assert converted(moved, tmp_path / "cache") == made
    assert (made / "model.safetensors").stat().st_mtime_ns == written
    assert made.stat().st_mtime > 0, "it counts as used now"
    other = write_gguf(save_tiny_llama(tmp_path / "tiny-2", seed=1), tmp_path / "a.gguf")
    assert converted(other, tmp_path / "cache") != made


def test_a_gateway_gets_no_weights(tmp_path: Path) -> None:
    file = write_gguf(save_tiny_llama(tmp_path / "tiny"), tmp_path / "a.gguf")
    made = converted(file, tmp_path / "cache", has_weights=False)
    assert {path.name for path in made.iterdir()} == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_nothing_is_left_of_a_conversion_that_failed(tmp_path: Path) -> None:
    file = write_gguf(save_tiny_llama(tmp_path / "tiny"), tmp_path / "a.gguf", tokenizer__ggml__tokens=["a", "a"])
    with pytest.raises(CheckpointError, match="has a token twice"):
        converted(file, tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_what_nobody_used_for_long_is_deleted(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    names = ("0123-bfloat16", "converting-abc", "4567-float32")
    for name in names:
        (cache / name).mkdir(parents=True)
    for name in names[:2]:
        os.utime(cache / name, (0, 0))
    converted(write_gguf(save_tiny_llama(tmp_path / "tiny"), tmp_path / "a.gguf"), cache)
    assert {path.name for path in cache.iterdir() if path.is_dir()} & set(names) == {"4567-float32"}


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = write_gguf(save_tiny_llama(tmp_path / "tiny"), tmp_path / "a.gguf")
    (tmp_path / "cache").touch()
    with pytest.raises(CheckpointError, match="name another directory by TANDEM_CACHE_DIR"):
        converted(file, tmp_path / "cache")


def test_a_file_or_a_directory_that_holds_only_one_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    file = write_gguf(save_tiny_llama(tmp_path / "tiny"), tmp_path / "model" / "small.Q4_0.gguf")
    made = resolve_model_path(str(file))
    assert made.parent == tmp_path / "cache" / "gguf"
    assert resolve_model_path(str(file.parent)) == made
    (file.parent / "mmproj-F16.gguf").touch()  # regression: an image projector beside the model was counted
    assert resolve_model_path(str(file.parent)) == made
    assert resolve_model_path(str(file), decoded_to="float32") != made
    assert served_name(str(file)) == "small.Q4_0"
    assert served_name(str(file.parent)) == "model"
    (file.parent / "another.gguf").touch()
    with pytest.raises(CheckpointError, match=r"has 2 GGUF files \(another.gguf, …\); name one of them"):
        resolve_model_path(str(file.parent))
