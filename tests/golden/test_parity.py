"""Our decoder against transformers on tiny random checkpoints: the same logits, the same greedy tokens.

float32 on both sides with plain attention, so that a difference is a bug and not rounding.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.compute.torch.kernels import TorchKernels
from tandem.models.loader import LoadedModel, load_model
from tests.helpers import checkpoints
from tests.helpers.delta_checkpoints import (
    save_tiny_kimi_linear,
    save_tiny_qwen3_5_conditional,
    save_tiny_qwen3_5_moe,
    save_tiny_qwen3_next,
)
from tests.helpers.specs import attention_of
from tests.helpers.stepping import REFERENCE, Stepper

NUM_GENERATED = 64
RELATIVE_ERROR = 1e-4
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
SLIDING = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
LAST_IS_FULL = ["sliding_attention", "sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Case:
    """A checkpoint: its builder, configuration keys, and a prompt length."""

    build: checkpoints.Builder
    options: Mapping[str, Any] = field(default_factory=dict)
    prompt_len: int = 50


def _rope(rope_type: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **options}}


LLAMA, QWEN2, QWEN3 = checkpoints.save_tiny_llama, checkpoints.save_tiny_qwen2, checkpoints.save_tiny_qwen3
MISTRAL, GEMMA3, GEMMA4 = checkpoints.save_tiny_mistral, checkpoints.save_tiny_gemma3, checkpoints.save_tiny_gemma4
LONGROPE = {"short_factor": [1.0, 1.1, 1.2, 1.5, 2.0, 2.5], "long_factor": [1.0, 1.5, 3.0, 8.0, 20.0, 40.0]}
GEMMA4_MOE = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 16}
MIXTRAL, QWEN3_MOE = checkpoints.save_tiny_mixtral, checkpoints.save_tiny_qwen3_moe
CASES = {
    "llama-gqa": Case(LLAMA),
    "llama-mha": Case(LLAMA, {"num_key_value_heads": 4}),
    "llama-mqa": Case(LLAMA, {"num_key_value_heads": 1}),
    "llama-tied": Case(LLAMA, {"tie_word_embeddings": True, "initializer_range": 0.2}),
    "llama-biases": Case(LLAMA, {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": Case(LLAMA, {"head_dim": 24}),
    "llama-theta": Case(LLAMA, {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    "llama-linear": Case(LLAMA, _rope("linear", factor=4.0)),
    "llama-llama3": Case(LLAMA, _rope("llama3", **LLAMA3)),
    "llama-yarn": Case(LLAMA, _rope("yarn", factor=4.0, original_max_position_embeddings=64), 70),
    "llama-yarn-options": Case(
        LLAMA,
        _rope(
            "yarn",
            factor=8.0,
            original_max_position_embeddings=32,
            beta_fast=16.0,
            beta_slow=2.0,
            mscale=0.7,
            mscale_all_dim=0.4,
            truncate=False,
        ),
    ),
    "llama-gelu": Case(LLAMA, {"hidden_act": "gelu_pytorch_tanh"}),
    "qwen2": Case(QWEN2),
    "qwen2-tied": Case(QWEN2, {"tie_word_embeddings": True, "initializer_range": 0.2}),
    "qwen2-sliding": Case(QWEN2, SLIDING),
    "qwen3": Case(QWEN3),
    "qwen3-biases": Case(QWEN3, {"attention_bias": True}),
    "qwen3-sliding": Case(QWEN3, SLIDING | {"layer_types": LAST_IS_FULL}),
    "qwen3-yarn": Case(QWEN3, _rope("yarn", factor=4.0, original_max_position_embeddings=64), 70),
    "mistral-window": Case(MISTRAL),
    "mistral-window-of-one": Case(MISTRAL, {"sliding_window": 1}),
    "mistral-window-in-some-layers": Case(
        MISTRAL, {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
    ),
    "mistral-window-in-no-layer": Case(MISTRAL, {"layer_types": ["full_attention"] * 3}),
    "mistral-full": Case(MISTRAL, {"sliding_window": None, "head_dim": 32}),
    "gemma3": Case(GEMMA3),
    "gemma3-untied": Case(GEMMA3, {"tie_word_embeddings": False}),
    "gemma3-softcaps": Case(GEMMA3, {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 3.0}),
    "gemma3-biases": Case(GEMMA3, {"attention_bias": True}),
    "gemma3-linear-global": Case(
        GEMMA3,
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            }
        },
    ),
    "gemma4": Case(GEMMA4),
    "gemma4-heads-of-512": Case(GEMMA4, {"head_dim": 256, "global_head_dim": 512}),
    "gemma4-own-values": Case(GEMMA4, {"attention_k_eq_v": False}),
    "gemma4-nothing-shared": Case(GEMMA4, {"num_kv_shared_layers": 0}),
    "gemma4-without-embeddings": Case(GEMMA4, {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}),
    "gemma4-only-global": Case(GEMMA4, {"layer_types": ["full_attention"] * 5}),
    "gemma4-biases": Case(GEMMA4, {"attention_bias": True, "final_logit_softcapping": 2.0}),
    "mixtral": Case(MIXTRAL),
    "mixtral-window": Case(MIXTRAL, {"sliding_window": 9}),
    "mixtral-one-expert": Case(MIXTRAL, {"num_experts_per_tok": 1}),
    "qwen3-moe": Case(QWEN3_MOE),
    "qwen3-moe-plain-sum": Case(QWEN3_MOE, {"norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": []}),
    **{name: Case(build) for name, build in (checkpoints.EXPERT_BUILDERS | checkpoints.MORE_BUILDERS).items()},
    "phi3-longrope-short": Case(
        checkpoints.save_tiny_phi3, {"partial_rotary_factor": 0.75} | _rope("longrope", factor=4.0, **LONGROPE)
    ),
    "phi3-longrope-long": Case(
        checkpoints.save_tiny_phi3,
        {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 32} | _rope("longrope", **LONGROPE),
    ),
    "gemma4-multimodal": Case(checkpoints.save_tiny_gemma4_conditional),
    "gemma4-multimodal-moe": Case(checkpoints.save_tiny_gemma4_conditional, GEMMA4_MOE),
    "gemma3-multimodal": Case(checkpoints.save_tiny_gemma3_conditional, {"seed": 3}),
    "ministral3-multimodal": Case(checkpoints.save_tiny_mistral3_conditional),
    "ministral3-multimodal-tied": Case(
        checkpoints.save_tiny_mistral3_conditional, {"tied": True, "initializer_range": 0.2}
    ),
    "mistral-multimodal": Case(checkpoints.save_tiny_mistral3_conditional, {"text": "mistral"}),
    "mistral4-multimodal": Case(checkpoints.save_tiny_mistral3_conditional, {"text": "mistral4"}),
}
RECURRENT_CASES = {  # whose engine tests are in test_recurrent.py
    "qwen3-next": Case(save_tiny_qwen3_next),
    "qwen3-next-biases": Case(save_tiny_qwen3_next, {"attention_bias": True, "norm_topk_prob": False}),
    "qwen3.5-moe": Case(save_tiny_qwen3_5_moe, {"linear_num_key_heads": 4}),
    "kimi-linear": Case(save_tiny_kimi_linear),
    "qwen3.5-multimodal": Case(save_tiny_qwen3_5_conditional),
}


def load(path: Path, dtype: str = "auto") -> LoadedModel:
    return load_model(str(path), dtype=dtype, device=torch.device("cpu"), kernels=TorchKernels())


def stepper(model: LoadedModel) -> Stepper:
    return Stepper(model.decoder, REFERENCE, num_tokens=192)


def random_prompt(length: int) -> list[int]:
    return torch.randint(6, 199, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def reference_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """[num_tokens, vocab] float32, from one pass without a cache."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits.float()


def chosen_after(model: Any, prompt: list[int], answer: list[int]) -> list[int]:
    """Greedy tokens after each part of the answer: `answer` itself if and only if the model gives it.

    One pass over everything, where generating takes one for each token.
    """
    chosen: list[int] = reference_logits(model, prompt + answer)[len(prompt) - 1 : -1].argmax(-1).tolist()
    return chosen


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def check_every_cut(begin: Callable[[], Stepper], prompt: list[int], expected: torch.Tensor) -> None:
    """Logits of a prompt in two parts are those `expected`, wherever it is cut."""
    for cut in range(1, len(prompt)):
        stepper = begin()
        logits = torch.cat((stepper.step(prompt[:cut]), stepper.step(prompt[cut:])))
        assert relative_error(logits, expected) < RELATIVE_ERROR, cut


def check_2000_tokens(path: Path, begin: Callable[[], Stepper]) -> None:
    """Logits of tokens 1,936 to 1,999 are those of `transformers`; the others are computed in chunks."""
    prompt = torch.randint(6, 199, (2000,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = reference_logits(checkpoints.load_reference(path), prompt)[-64:]
    stepper = begin()
    for start in range(0, 1936, 176):
        stepper.step(prompt[start : start + 176])
    logits = torch.cat([stepper.step([token]) for token in prompt[1936:]])
    assert relative_error(logits, expected) < RELATIVE_ERROR


def assert_same(path: Path, prompt: list[int]) -> list[int]:
    """Whole-prompt logits and greedy tokens equal; returns the tokens."""
    model, reference = load(path), checkpoints.load_reference(path)
    assert relative_error(stepper(model).step(prompt), reference_logits(reference, prompt)) < RELATIVE_ERROR
    tokens = stepper(model).generate(prompt, NUM_GENERATED)
    assert tokens == chosen_after(reference, prompt, tokens)
    return tokens


@pytest.mark.parametrize("name", CASES | RECURRENT_CASES)
def test_logits_and_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    case = (CASES | RECURRENT_CASES)[name]
    path = case.build(tmp_path, **case.options)
    tokens = assert_same(path, random_prompt(case.prompt_len))
    assert len(set(tokens)) > 4, "a model that repeats itself shows nothing"


@pytest.mark.parametrize(
    "family",
    [
        *(checkpoints.BUILDERS | checkpoints.EXPERT_BUILDERS),
        *(pytest.param(family, marks=pytest.mark.slow) for family in checkpoints.MORE_BUILDERS),
    ],
)
def test_chunked_prefill_equals_whole(family: str, tmp_path: Path) -> None:
    builders = checkpoints.BUILDERS | checkpoints.EXPERT_BUILDERS | checkpoints.MORE_BUILDERS
    model = load(builders[family](tmp_path))
    prompt = random_prompt(50)
    assert stepper(model).generate(prompt, 24, chunk=7) == stepper(model).generate(prompt, 24)


QUICK_HALVES = {("llama", "bfloat16"), ("llama", "float16"), ("gemma4", "bfloat16"), ("deepseek_v3", "bfloat16")}
HALVES = [
    pytest.param(*pair, marks=() if pair in QUICK_HALVES else pytest.mark.slow)
    for pair in itertools.product(checkpoints.BUILDERS, ("bfloat16", "float16"))
]


@pytest.mark.parametrize(("family", "dtype"), HALVES)
def test_half_precision_diverges_only_between_near_ties(family: str, dtype: str, tmp_path: Path) -> None:
    """Rounding may flip a close call: then each side's token is among the other's five best."""
    path = checkpoints.BUILDERS[family](tmp_path, dtype=dtype)
    model, reference = load(path), checkpoints.load_reference(path, getattr(torch, dtype))
    assert model.spec.dtype == dtype
    prompt = random_prompt(50)
    tokens = stepper(model).generate(prompt, NUM_GENERATED)
    for index, ours in enumerate(tokens):
        prefix = prompt + tokens[:index]
        theirs = reference_logits(reference, prefix)[-1]
        if ours != theirs.argmax():
            assert ours in theirs.topk(5).indices
            assert theirs.argmax() in stepper(model).step(prefix)[-1].topk(5).indices
            break


class TestOlderFiles:
    """Files written before `rope_parameters` and `dtype` mean the same."""

    def test_rope_scaling_and_theta_at_the_top(self, tmp_path: Path) -> None:
        path = checkpoints.save_tiny_llama(tmp_path)
        scaling = {"type": "linear", "factor": 2.0}
        checkpoints.edit_config(
            path, rope_parameters=..., rope_scaling=scaling, rope_theta=5000.0, dtype=..., torch_dtype="float32"
        )
        assert_same(path, random_prompt(40))

    def test_llama3_scaling(self, tmp_path: Path) -> None:
        path = checkpoints.save_tiny_llama(tmp_path)
        scaling = {"rope_type": "llama3", **LLAMA3}
        checkpoints.edit_config(path, rope_parameters=..., rope_scaling=scaling, rope_theta=500000.0)
        assert_same(path, random_prompt(40))

    def test_gemma_pattern_and_local_theta(self, tmp_path: Path) -> None:
        path = checkpoints.save_tiny_gemma3(tmp_path)
        checkpoints.edit_config(
            path,
            rope_parameters=...,
            layer_types=...,
            sliding_window_pattern=2,
            rope_theta=100000.0,
            rope_local_base_freq=7000.0,
            rope_scaling={"rope_type": "linear", "factor": 4.0},
        )
        assert [mixer.window for mixer in attention_of(load(path).spec)] == [10, None, 10]
        assert_same(path, random_prompt(40))

    def test_absent_keys_mean_the_family_defaults(self, tmp_path: Path) -> None:
        path = checkpoints.save_tiny_llama(tmp_path, num_key_value_heads=4)
        absent: dict[str, Any] = dict.fromkeys(
            ("num_key_value_heads", "head_dim", "rope_parameters", "hidden_act", "rms_norm_eps", "attention_bias"), ...
        )
        checkpoints.edit_config(path, **absent)
        assert_same(path, random_prompt(40))


class TestRedundantHead:
    """A configuration says tied, the file has `lm_head.weight` all the same. transformers ties only equal tensors."""

    def _save(self, path: Path, scale: float) -> Path:
        checkpoints.save_tiny_llama(path, tie_word_embeddings=True, initializer_range=0.2)
        tensors = checkpoints.read_tensors(path)
        head = tensors["model.embed_tokens.weight"] * scale
        checkpoints.write_tensors(path, tensors | {"lm_head.weight": head})
        return path

    def test_head_alone_serves_as_both(self, tmp_path: Path) -> None:
        path = self._save(tmp_path, scale=1.0)
        tensors = checkpoints.read_tensors(path)
        del tensors["model.embed_tokens.weight"]
        checkpoints.write_tensors(path, tensors)
        assert load(path).spec.tie_word_embeddings
        assert_same(path, random_prompt(40))

    def test_equal_is_tied(self, tmp_path: Path) -> None:
        path = self._save(tmp_path, scale=1.0)
        assert load(path).spec.tie_word_embeddings
        assert_same(path, random_prompt(40))

    def test_different_is_used(self, tmp_path: Path) -> None:
        path = self._save(tmp_path, scale=-1.5)
        assert not load(path).spec.tie_word_embeddings
        assert_same(path, random_prompt(40))
