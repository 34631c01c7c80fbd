"""Greedy tokens of GGUF files are those of `transformers` on the same file, where it reads the architecture.

It takes what a file leaves out from its own defaults, so sizes are these.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tandem.core.sampling_params import SamplingParams
from tandem.engine.resolve import build_engine
from tandem.models.gguf.convert import converted
from tests.helpers.checkpoints import (
    save_tiny_gemma2,
    save_tiny_gemma3,
    save_tiny_phi3,
    save_tiny_qwen2,
    save_tiny_qwen2_moe,
    save_tiny_qwen3,
    save_tiny_qwen3_moe,
)
from tests.helpers.delta_checkpoints import save_tiny_qwen3_5, save_tiny_qwen3_5_moe
from tests.helpers.engines import TINY, drain, token_ids
from tests.helpers.gguf_files import write_gguf
from tests.helpers.hybrid_checkpoints import save_tiny_lfm2

PROMPTS = ([5, 9, 13, 2], list(range(40, 75)), [7])
NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
GEMMA: dict[str, Any] = {
    "num_hidden_layers": 7,
    "layer_types": None,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
GEMMA2: dict[str, Any] = GEMMA | {
    "num_hidden_layers": 3,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
MODELS: dict[str, Callable[..., Path]] = {
    "qwen2": save_tiny_qwen2,
    "qwen3": partial(save_tiny_qwen3, head_dim=128),
    "qwen2moe": partial(save_tiny_qwen2_moe, moe_intermediate_size=1408, shared_expert_intermediate_size=5632),
    "qwen3moe": partial(save_tiny_qwen3_moe, mlp_only_layers=[], moe_intermediate_size=768),
    "gemma2": partial(save_tiny_gemma2, **GEMMA2),
    "gemma3": partial(save_tiny_gemma3, **GEMMA),
    "phi3": save_tiny_phi3,
    "qwen35": save_tiny_qwen3_5,
    "qwen35moe": save_tiny_qwen3_5_moe,
    "lfm2": partial(save_tiny_lfm2, tie_word_embeddings=True),
}
QUICK = [("lfm2", "Q4_0"), ("qwen35", "F32")]
CASES = [*QUICK, *(pytest.param(name, "F32", marks=pytest.mark.slow) for name in MODELS if name != "qwen35")]


@pytest.mark.parametrize(("name", "type_name"), CASES)
def test_greedy_tokens(tmp_path: Path, name: str, type_name: str) -> None:
    plain = MODELS[name](tmp_path / "plain")
    file = write_gguf(plain, tmp_path / "a.gguf", type_name=type_name, tokenizer__ggml__padding_token_id=0)
    oracle: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    model = str(converted(file, tmp_path / "cache"))
    engine = build_engine(replace(TINY, model=model, dtype="float32", kv_cache_bytes=64 << 20))
    ids = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    outputs = drain(engine)
    for request_id, prompt in zip(ids, PROMPTS, strict=True):
        found = oracle.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert token_ids(outputs[request_id, 0]) == found[0, len(prompt) :].tolist(), prompt
