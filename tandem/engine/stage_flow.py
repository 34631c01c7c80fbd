"""Steps in stages of layers: micro-batches, which follow one another through the stages, and what passes between those.

A micro-batch has whole requests, and kernels compute a row in the same way whatever the others are, so the division
changes no bit. All ranks divide a step alike.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from tandem.architecture.model import ModelSpec
from tandem.compute.collectives import RankLinks
from tandem.compute.layer_states import TORCH_DTYPES
from tandem.engine.inputs import ModelInputs
from tandem.scheduler.output import SchedulerOutput

_LEAST_TOKENS = 4  # of a micro-batch: each reads all weights, so that fewer cost as much


def micro_batches(step: SchedulerOutput, most: int) -> Iterator[SchedulerOutput]:
    """The step as at most `most` steps of neighbouring requests, of similar numbers of tokens."""
    ends = [0]
    for item in step.scheduled:
        ends.append(ends[-1] + item.num_tokens)
    count = max(1, min(most, ends[-1] // _LEAST_TOKENS))
    cuts = [0]
    for part in range(1, count):
        wanted = ends[-1] * part / count
        cuts.append(min(range(len(ends)), key=lambda i: abs(ends[i] - wanted)))
    cuts.append(len(step.scheduled))
    released = step.released
    for first, end in pairwise(cuts):
        if first < end:
            yield replace(step, scheduled=step.scheduled[first:end], released=released)
            released = ()


def joined_inputs(parts: Sequence[ModelInputs], hidden: Sequence[torch.Tensor]) -> ModelInputs:
    """Those of a step, as they index its hidden states: `hidden`, of each micro-batch, one after the other."""
    sample_rows, first_rows, first_tokens = [], [], []
    num_rows = num_tokens = 0
    for part, rows in zip(parts, hidden, strict=True):
        sample_rows.append(part.sample_rows + num_rows)
        first_rows += [row + num_rows for row in part.first_rows]
        first_tokens += [token + num_tokens for token in part.first_tokens]
        num_rows += len(rows)
        num_tokens += len(part.input_ids)
    return replace(
        parts[0],
        input_ids=torch.cat([part.input_ids for part in parts]),
        positions=torch.cat([part.positions for part in parts]),
        sample_rows=torch.cat(sample_rows),
        first_rows=tuple(first_rows),
        first_tokens=tuple(first_tokens),
        wanted=None,
        parts=tuple(parts),
    )


class StageFlow:
    """The residual streams that a rank of a stage gets and passes on. `spec`: of the stage."""

    def __init__(self, links: RankLinks, spec: ModelSpec) -> None:
        self._links = links
        self._gets_wanted = spec.num_prompt_layers < 1
        self._width, self._dtype = spec.hidden_size, TORCH_DTYPES[spec.dtype]

    @property
    def num_stages(self) -> int:
        return self._links.num_stages

    def receive(self, inputs: ModelInputs) -> torch.Tensor | None:
        """[num_tokens, hidden_size] from the stage before, of those that pass it; None = this is the first stage.

        Raises:
            EngineStoppedError: a rank is lost or late.
        """
        if self._links.before is None:
            return None
        is_cut = self._gets_wanted and inputs.wanted is not None
        rows = inputs.wanted.rows if is_cut and inputs.wanted is not None else inputs.input_ids
        stream = torch.empty(len(rows), self._width, dtype=self._dtype)
        return self._links.before.receive(stream) if len(stream) else stream

    def send(self, stream: torch.Tensor) -> None:
        """To the next stage, where there is one; raises as `receive`."""
        if self._links.after is not None and len(stream):
            self._links.after.send(stream)
