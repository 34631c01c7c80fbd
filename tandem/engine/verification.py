"""Verification of drafts: samples a request's next tokens, position by position, for as long as the drafts were right.

Every token is drawn from the logits, history, seed and position that it would be drawn from without drafts. A draft is
right if it is that token. So an answer has the same tokens with and without drafts, greedy or sampled.
"""

from collections.abc import Sequence

import torch

from tandem.engine.constraint import constraints_of
from tandem.engine.logits import SamplingState
from tandem.engine.masks import MaskMaker
from tandem.engine.sampler import Sampler, take_rows
from tandem.scheduler.output import SampledToken


def choose_tokens(
    sampler: Sampler,
    logits: torch.Tensor,
    states: Sequence[SamplingState],
    drafts: Sequence[Sequence[int]],
    masks: MaskMaker | None,
) -> list[list[SampledToken]]:
    """Samples the next tokens of each request: its drafts that are right, and one more. Advances the states.

    Args:
        logits: float32 [num_rows, vocab_size]; for each request one row, and one for each of its drafts.
        masks: makes the grammar masks of a request's later positions, once the tokens before are chosen. Those of its
            first position, made while the model ran, must be in `states` (`MaskMaker.finish`). None = no grammars.
    """
    starts = [0]
    for draft in drafts:
        starts.append(starts[-1] + 1 + len(draft))
    assert logits.shape[0] == starts[-1]
    chosen: list[list[SampledToken]] = [[] for _ in states]
    active = list(range(len(states)))
    depth = 0
    while active:
        if depth and masks is not None:
            masks.start(constraints_of([states[index].constraint for index in active]))
            masks.finish()
        rows = take_rows(logits, [starts[index] + depth for index in active])
        tokens = sampler.sample(rows, [states[index] for index in active])
        going_on = []
        for index, token in zip(active, tokens, strict=True):
            chosen[index].append(token)
            if not token.is_token:
                continue
            states[index].observe(token.token_id)
            if depth < len(drafts[index]) and drafts[index][depth] == token.token_id:
                going_on.append(index)
        active = going_on
        depth += 1
    return chosen
