"""Random mixes of requests, and what they must be answered: by one engine in this process, and by transformers.

Every request is answered alone, cold and by the plainest code there is; how a cluster serves it must not matter.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tandem.core.sampling_params import SamplingParams
from tests.helpers.checkpoints import load_reference
from tests.helpers.engines import drain, text, tiny_engine, token_ids
from tests.helpers.serving_clients import Ask, Reply
from tests.helpers.tokenizers import NUM_TOKENS

EOS = NUM_TOKENS - 1
MAX_PROMPT_TOKENS = 200
_MAX_OUTPUT_TOKENS = 40
_EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 64, 65, MAX_PROMPT_TOKENS)


def random_prompt(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(256) for _ in range(length))


def random_mix(path: Path, seed: int, num_asks: int) -> list[Ask]:
    """Prompts of 1 to 200 tokens, some of which start alike; every option that changes tokens, alone and mixed."""
    rng = random.Random(seed)
    prefixes = [random_prompt(rng, length) for length in (48, 100)]
    asks = [Ask(_prompt(rng, index, prefixes), _params(rng, index)) for index in range(num_asks)]
    return [_with_stop(path, rng, ask) if index % 4 == 3 else ask for index, ask in enumerate(asks)]


def expected(path: Path, asks: Sequence[Ask]) -> list[list[Reply]]:
    """A reply for each choice of each, from an engine of its own that caches nothing."""
    return [_expected(path, ask) for ask in asks]


def transformers_greedy(path: Path, asks: Sequence[Ask]) -> list[tuple[int, ...]]:
    """Continuation of each prompt by transformers, greedy in float32, to `max_tokens` and past any end."""
    model = load_reference(path)
    return [_transformers_greedy(model, ask.prompt, ask.params.max_tokens) for ask in asks]


def _transformers_greedy(model: Any, prompt: Sequence[int], num_tokens: int | None) -> tuple[int, ...]:
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=num_tokens,
        do_sample=False,
        use_cache=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return tuple(output[0, len(prompt) :].tolist())


def _expected(path: Path, ask: Ask) -> list[Reply]:
    engine = tiny_engine(path, prefix_caching=False, max_num_batched_tokens=256)
    engine.add_request(list(ask.prompt), ask.params, request_id="r")
    outputs = drain(engine)
    return [
        Reply(tuple(token_ids(found)), text(found), found[-1].finish_reason, found[-1].stop_reason)
        for found in (outputs["r", index] for index in range(ask.params.n))
    ]


def _prompt(rng: random.Random, index: int, prefixes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    if index < len(_EDGES):
        return random_prompt(rng, _EDGES[index])
    prefix = rng.choice([(), *prefixes])
    return prefix + random_prompt(rng, rng.randint(1, MAX_PROMPT_TOKENS - len(prefix)))


def _params(rng: random.Random, index: int) -> SamplingParams:
    max_tokens = rng.choice([1, 2, 8, rng.randint(9, _MAX_OUTPUT_TOKENS)])
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=index)
    if index % 4 == 0:
        return params
    if rng.random() < 0.6:
        params = replace(params, temperature=rng.choice([0.5, 1.0, 1.5]), top_p=rng.choice([1.0, 0.9]))
        params = replace(params, top_k=rng.choice([0, 20]), min_p=rng.choice([0.0, 0.02]), n=rng.choice([1, 1, 2]))
    if rng.random() < 0.4:
        params = replace(params, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.4)
    if rng.random() < 0.4:
        params = replace(params, ignore_eos=False, logit_bias={EOS: 12.0}, min_tokens=rng.randint(0, max_tokens))
    return params


def _with_stop(path: Path, rng: random.Random, ask: Ask) -> Ask:
    """Stops at some text of its own answer."""
    whole = _expected(path, ask)[0].text
    start = rng.randrange(len(whole)) if whole else 0
    stop = whole[start : start + rng.randint(1, 3)]
    return replace(ask, params=replace(ask.params, stop=(stop,))) if stop else ask
