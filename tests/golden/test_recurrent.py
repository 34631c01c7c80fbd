"""Recurrent states beside transformers: a prompt cut at every position, long prompts, and requests that share steps."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.core.sampling_params import SamplingParams
from tests.golden.test_parity import RELATIVE_ERROR, load, random_prompt, reference_logits, relative_error
from tests.helpers import checkpoints
from tests.helpers.engines import drain, serve_alone, tiny_engine, token_ids
from tests.helpers.stepping import REFERENCE, Stepper
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer

FAMILIES = checkpoints.RECURRENT_BUILDERS
PYTHON = {"dtype": "float32", "native_kernels": False, "attention_backend": "reference"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_cut_at_every_position(family: str, tmp_path: Path) -> None:
    path, prompt = FAMILIES[family](tmp_path), random_prompt(30)
    expected = reference_logits(checkpoints.load_reference(path), prompt)
    model = load(path)
    for cut in range(1, len(prompt)):
        stepper = Stepper(model.decoder, REFERENCE, num_tokens=len(prompt))
        logits = torch.cat((stepper.step(prompt[:cut]), stepper.step(prompt[cut:])))
        assert relative_error(logits, expected) < RELATIVE_ERROR, cut


def test_without_experts_and_with_positions(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_local_experts": 0, "position_embedding_type": "rope", "mamba_proj_bias": True}
    path, prompt = checkpoints.save_tiny_granite_hybrid(tmp_path, **options), random_prompt(40)
    expected = reference_logits(checkpoints.load_reference(path), prompt)
    logits = Stepper(load(path).decoder, REFERENCE, num_tokens=40).step(prompt)
    assert relative_error(logits, expected) < RELATIVE_ERROR


@pytest.mark.parametrize("family", FAMILIES)
def test_errors_do_not_grow_over_2000_tokens(family: str, tmp_path: Path) -> None:
    path = FAMILIES[family](tmp_path, max_position_embeddings=4096)
    prompt = torch.randint(6, 199, (2000,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = reference_logits(checkpoints.load_reference(path), prompt)[-64:]
    stepper = Stepper(load(path).decoder, REFERENCE, num_tokens=len(prompt))
    for start in range(0, 1936, 176):
        stepper.step(prompt[start : start + 176])
    logits = torch.cat([stepper.step([token]) for token in prompt[1936:]])
    assert relative_error(logits, expected) < RELATIVE_ERROR


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_that_share_small_steps_get_the_tokens_they_get_alone(family: str, tmp_path: Path) -> None:
    path = write_byte_tokenizer(FAMILIES[family](tmp_path, vocab_size=NUM_TOKENS, eos_token_id=NUM_TOKENS - 1))
    rng = random.Random(3)
    prompts = {f"r{index}": [rng.randrange(256) for _ in range(rng.randint(1, 60))] for index in range(6)}
    params = {
        name: SamplingParams(temperature=index % 2, seed=index, max_tokens=20, ignore_eos=True)
        for index, name in enumerate(prompts)
    }
    expected = serve_alone(path, prompts, params, prefix_caching=False, max_num_batched_tokens=256, **PYTHON)
    engine = tiny_engine(path, max_num_batched_tokens=11, max_num_running=6, block_size=8, **PYTHON)
    for name, prompt in prompts.items():
        engine.add_request(prompt, params[name], request_id=name)
    outputs = drain(engine)
    assert {name: token_ids(outputs[name, 0]) for name in prompts} == expected
    engine.check()
    assert engine.kv_usage.used == 0
