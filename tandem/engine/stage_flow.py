"""Pipeline parallelism: divides a step into micro-batches, and passes their residual streams from stage to stage.

A stage is a range of the model's layers on ranks (processes of the worker) of its own. A micro-batch has neighbouring
tokens of a step: whole requests, and pieces of long prompts. Kernels compute a row in the same way whatever the other
rows are, so the division changes no bit. All ranks divide a step alike.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch

from tandem.architecture.model import ModelSpec
from tandem.architecture.stages import PIECE_TOKENS, num_micro_batches
from tandem.compute.collectives import RankLinks
from tandem.compute.layer_states import TORCH_DTYPES
from tandem.engine.inputs import ModelInputs
from tandem.engine.token_parts import TokenPart
from tandem.scheduler.output import ScheduledRequest, SchedulerOutput


def micro_batches(
    step: SchedulerOutput, num_stages: int, block_size: int, num_contexts: int = 1
) -> Iterator[list[TokenPart]]:
    """Divides a step into micro-batches of similar numbers of tokens (`num_micro_batches`), prompts at block
    boundaries.

    Args:
        num_contexts: number of contexts that divide each micro-batch further (`token_parts`), so that it is longer by
            this factor.
    """
    count = num_micro_batches(step.num_tokens, num_stages, PIECE_TOKENS * num_contexts)
    starts = [0, *accumulate(item.num_tokens for item in step.scheduled)]
    for first, end in pairwise(_cuts(step.scheduled, starts, count, block_size)):
        yield [
            TokenPart(_piece(item, max(first - start, 0), min(end - start, item.num_tokens)), item)
            for start, item in zip(starts, step.scheduled, strict=False)
            if start < end and first < start + item.num_tokens
        ]


def _cuts(scheduled: Sequence[ScheduledRequest], starts: Sequence[int], count: int, block_size: int) -> list[int]:
    """Bounds of at most `count` micro-batches, in tokens of the step; fewer if requests cannot be divided."""
    cuts = {0, starts[-1]}
    for part in range(1, count):
        wanted = starts[-1] * part / count
        index = bisect_left(starts, wanted) - 1
        item, start = scheduled[index], starts[index]
        possible = [start, starts[index + 1]]
        if not item.num_drafts and not item.scores_prompt:
            before = int(item.start + wanted - start) // block_size * block_size + start - item.start
            possible += [cut for cut in (before, before + block_size) if start < cut < starts[index + 1]]
        cuts.add(min(possible, key=lambda cut: abs(cut - wanted)))
    return sorted(cuts)


def _piece(item: ScheduledRequest, first: int, end: int) -> ScheduledRequest:
    """The scheduled request reduced to its tokens `first` to `end - 1`."""
    if end - first == item.num_tokens:
        return item
    return replace(
        item,
        start=item.start + first,
        token_ids=item.token_ids[first:end],
        samples=item.samples and end == item.num_tokens,
    )


def joined_inputs(parts: Sequence[ModelInputs], hidden: Sequence[torch.Tensor]) -> ModelInputs:
    """Inputs of a whole step whose micro-batches were computed one after the other. `hidden`: hidden states of each,
    which the rows index concatenated. A request in several pieces has the first row and first token of its last piece.
    """
    if not parts:
        nothing = torch.empty(0, dtype=torch.int64)
        return ModelInputs(nothing, nothing, (), nothing)
    sample_rows, first_rows, first_tokens = [], [], []
    num_rows = num_tokens = 0
    for part, rows in zip(parts, hidden, strict=True):
        sample_rows.append(part.sample_rows + num_rows)
        first_rows += [row + num_rows for row in part.first_rows[: part.num_ended]]
        first_tokens += [token + num_tokens for token in part.first_tokens[: part.num_ended]]
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
    """Receives and sends residual streams for one rank of a pipeline stage. `spec`: the stage's layers."""

    def __init__(self, links: RankLinks, spec: ModelSpec) -> None:
        self._links = links
        self._gets_wanted = spec.num_prompt_layers < 1
        self._width, self._dtype = spec.stream_size, TORCH_DTYPES[spec.dtype]

    def receive(self, inputs: ModelInputs) -> torch.Tensor | None:
        """The residual stream from the previous stage, [num_tokens, stream_size], of the tokens that this stage
        computes; None = this is the first stage.

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
        """Sends the residual stream [num_tokens, stream_size] to the next stage, if there is one. Raises
        `EngineStoppedError` if a rank is lost or late.
        """
        if self._links.after is not None and len(stream):
            self._links.after.send(stream)
