"""Engines of one rank and of several, and requests whose answers must have the same bits on all of them."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tandem.core.config import EngineConfig
from tandem.core.sampling_params import SamplingParams
from tandem.engine.drafts.speculation import Speculation
from tandem.engine.engine import Engine
from tandem.engine.forward_pass import ForwardPass
from tandem.engine.resolve import assemble
from tandem.ranks.group import RankGroup, share_of
from tests.helpers.engines import TINY, drain
from tests.helpers.forked_ranks import forked_ranks

PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=3),
    "sampled": SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=120, ignore_eos=True, logprobs=3),
    "scored": SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=2, logprobs=2),
    "drafted": SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logit_bias={7: 100.0}),
    "choices": SamplingParams(seed=8, n=2, max_tokens=8, ignore_eos=True, logprobs=1),
}
PROMPTS = {name: [7 + (5 * i + j) % 90 for j in range(30 + 31 * i)] for i, name in enumerate(PARAMS)}


def ranked_config(path: Path, **overrides: Any) -> EngineConfig:
    """Compiled kernels, steps of 32 tokens, one thread a rank. Drafters guess in every step: on a busy machine it may
    never pay, or in other steps each time.
    """
    own: dict[str, Any] = {"dtype": "auto", "native_kernels": True, "attention_backend": "auto", "num_threads": 1}
    return replace(TINY, model=str(path), **own | {"max_num_batched_tokens": 32, "draft_always": True} | overrides)


@contextmanager
def led_engine(
    config: EngineConfig,
    num_ranks: int,
    *,
    num_stages: int = 1,
    num_contexts: int = 1,
    deadline_s: float = 60.0,
    speculation: Speculation | None = None,
    are_forked: bool = True,
) -> Iterator[tuple[Engine, RankGroup]]:
    """An engine that leads so many ranks of all stages and contexts together, and their group.

    `are_forked`: the ranks begin at once, and end with the test's process whatever it does.
    """
    config = share_of(config, num_ranks)
    with forked_ranks() if are_forked else nullcontext():
        group = RankGroup(config, num_ranks, num_stages=num_stages, num_contexts=num_contexts, deadline_s=deadline_s)
        try:
            engine = assemble(config, ranks=group, speculation=speculation).engine
            yield engine, group
            engine.close()
        finally:
            group.close()


def ends(process_id: int, within_s: float = 10.0) -> bool:
    """Whether a process ends by itself.

    NOTE: one whose parent has ended may be a zombie for as long as a container lives.
    """
    try:
        process = psutil.Process(process_id)
        if process.status() != psutil.STATUS_ZOMBIE:
            process.wait(within_s)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def answers(engine: Engine) -> dict[tuple[str, int], list[tuple[object, ...]]]:
    """Tokens and logprobs, to the bit, of all requests at once, and of one again when its prompt is cached."""
    for name, params in PARAMS.items():
        engine.add_request(PROMPTS[name], params, request_id=name)
    found = drain(engine)
    engine.add_request(PROMPTS["choices"], PARAMS["greedy"], request_id="cached")
    found |= drain(engine)
    return {
        key: [(each.token_ids, each.logprobs, each.prompt_logprobs, each.finish_reason) for each in outputs]
        for key, outputs in found.items()
    }


def bits(engine: Engine) -> tuple[dict[tuple[str, int], list[tuple[object, ...]]], set[str]]:
    """`answers`, and digests of the whole rows of logits behind them.

    NOTE: an engine that drafts computes more rows than one that does not, and one that preempts some of them twice.
    """
    rows: list[str] = []
    compute = ForwardPass.logits

    def noted(self: ForwardPass, hidden: torch.Tensor, wanted: torch.Tensor | None = None) -> torch.Tensor:
        found = compute(self, hidden, wanted)
        assert found.dtype == torch.float32
        rows.extend(blake2b(row.numpy().tobytes(), digest_size=8).hexdigest() for row in found)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ForwardPass, "logits", noted)
        found = answers(engine)
    assert len(rows) > sum(params.max_tokens or 0 for params in PARAMS.values())
    return found, set(rows)
