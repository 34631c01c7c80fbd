"""The whole engine against `transformers`: the same greedy tokens, for every family and option.

Prompts of several lengths share one batch, their prefills are cut into small chunks, and part of each is found in the
prefix cache; transformers reads them one by one. float32 on both sides, so that a difference is a bug.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.compute.native.bindings import unavailable_reason
from tandem.core.sampling_params import SamplingParams
from tandem.core.types import FinishReason
from tandem.engine.engine import Engine
from tests.golden.test_parity import CASES, chosen_after
from tests.helpers import checkpoints
from tests.helpers.engines import drain, tiny_engine, token_ids
from tests.helpers.tokenizers import write_byte_tokenizer

NUM_GENERATED = 64
SMALL_STEPS = {"max_num_batched_tokens": 24, "max_num_running": 8, "block_size": 8, "kv_cache_bytes": 4 << 20}
KERNELS: dict[str, dict[str, object]] = {
    "torch": {"native_kernels": False, "attention_backend": "reference"},
    "native": {"native_kernels": True, "attention_backend": "native"},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_GENERATED)
PAST_THE_END = SamplingParams(temperature=0.0, max_tokens=NUM_GENERATED, ignore_eos=True)


BY_PYTORCH = ("llama-gqa", "gemma4", "mixtral", "gpt_oss", "deepseek_v3", "deepseek_v32")
"""Cases that are quick with either kind of kernels: the plain loops of the reference take three times as long."""
BY_EITHER = [
    pytest.param(kernels, name, marks=pytest.mark.slow if kernels == "torch" and name not in BY_PYTORCH else ())
    for name in CASES
    for kernels in sorted(KERNELS)
]


@pytest.fixture(params=sorted(KERNELS))
def kernels(request: pytest.FixtureRequest) -> dict[str, object]:
    if request.param == "native" and (reason := unavailable_reason()) is not None:
        pytest.skip(f"no compiled kernels: {reason}")
    return KERNELS[request.param]


def prompts_with_shared_prefixes() -> list[list[int]]:
    """The first is long; three start as it does, for 8, 29 and 61 tokens; two, one of a single token, do not."""
    generator = torch.Generator().manual_seed(11)
    long, *tails = (torch.randint(6, 199, (n,), generator=generator).tolist() for n in (75, 2, 14, 5, 41, 1))
    return [long, long[:8] + tails[0], long[:29] + tails[1], long[:61] + tails[2], tails[3], tails[4]]


def generate_in_transformers(model: Any, prompt: list[int], eos_token_id: int) -> list[int]:
    """NOTE: without its cache, which for a window of one token keeps all of them (transformers 5.23)."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NUM_GENERATED,
        do_sample=False,
        use_cache=False,
        eos_token_id=eos_token_id,
        pad_token_id=0,
    )
    generated: list[int] = output[0, len(prompt) :].tolist()
    return generated


def serve(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    """The first prompt is half done when the others arrive, so that they find its blocks and share its steps."""
    ids = [engine.add_request(prompts[0], params)]
    head = [output for _ in range(8) for output in engine.step()]
    ids += [engine.add_request(prompt, params) for prompt in prompts[1:]]
    outputs = drain(engine)
    outputs[ids[0], 0] = head + outputs[ids[0], 0]
    assert engine.counters.num_cached_prompt_tokens >= 8 + 24 + 56, "no prefix was found"
    return [token_ids(outputs[request_id, 0]) for request_id in ids]


@pytest.mark.parametrize(("kernels", "name"), BY_EITHER, indirect=["kernels"])
def test_greedy_tokens_equal_generate(name: str, kernels: dict[str, object], tmp_path: Path) -> None:
    path = write_byte_tokenizer(CASES[name].build(tmp_path, **CASES[name].options))
    prompts = prompts_with_shared_prefixes()
    reference = checkpoints.load_reference(path)
    engine = tiny_engine(path, **SMALL_STEPS | kernels)
    answers = serve(engine, prompts, PAST_THE_END)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer) == NUM_GENERATED
        assert answer == chosen_after(reference, prompt, answer), f"prompt of {len(prompt)} tokens"


@pytest.mark.parametrize("family", checkpoints.family_params(checkpoints.BUILDERS))
def test_both_stop_at_the_end_of_sequence(family: str, kernels: dict[str, object], tmp_path: Path) -> None:
    """The token that ends the answer is part of it; it is one that the model is known to say."""
    path = write_byte_tokenizer(checkpoints.BUILDERS[family](tmp_path))
    prompt = prompts_with_shared_prefixes()[2]
    said = serve(tiny_engine(path, **SMALL_STEPS | kernels), prompts_with_shared_prefixes(), PAST_THE_END)[2]
    eos = next(token for index, token in enumerate(said) if index >= 9 and token not in said[:index])
    checkpoints.edit_generation_config(path, eos_token_id=eos)
    engine = tiny_engine(path, **SMALL_STEPS | kernels)
    request_id = engine.add_request(prompt, GREEDY)
    outputs = drain(engine)[request_id, 0]
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert token_ids(outputs) == said[: said.index(eos) + 1]
    assert token_ids(outputs) == generate_in_transformers(checkpoints.load_reference(path), prompt, eos)
