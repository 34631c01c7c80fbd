"""Steps in contexts: the consecutive tokens of prompts that each rank of a group computes, and whose turn it is.

A part is computed as a smaller chunk would be, which changes no bit. In each layer a rank writes what is kept of its
tokens when the rank with those before has, in memory that both map: it finds what a later chunk would find. It waits
for nobody else, so contexts follow each other through the layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from tandem.compute.collectives import RankLinks
from tandem.kvcache.prefix import NULL_BLOCK
from tandem.scheduler.output import ScheduledRequest


@dataclass(frozen=True, slots=True)
class TokenPart:
    """Consecutive tokens of what a step computes of a request. `whole`: all of them."""

    item: ScheduledRequest
    whole: ScheduledRequest

    @property
    def cuts(self) -> list[int]:
        """Positions where tokens of other parts end or begin."""
        starts = [self.item.start] if self.item.start > self.whole.start else []
        return [*starts, self.item.end] if self.item.end < self.whole.end else starts


def token_parts(
    scheduled: Sequence[ScheduledRequest], context: int, num_contexts: int, block_size: int
) -> list[TokenPart] | None:
    """Parts of a step's requests that context `context` computes; None = the last one computes all of them.

    Of equal numbers of tokens, cut between blocks. The last context has all tokens whose logits are asked for.
    """
    bounds = [_bounds(item, num_contexts, block_size) for item in scheduled]
    if not any(bounds):
        return None
    parts = []
    for item, cuts in zip(scheduled, bounds, strict=True):
        if cuts:
            first, end = cuts[context], cuts[context + 1]
            tokens = item.token_ids[first - item.start : end - item.start]
            is_last = context + 1 == num_contexts
            parts.append(
                TokenPart(replace(item, start=first, token_ids=tokens, samples=item.samples and is_last), item)
            )
        elif context + 1 == num_contexts:
            parts.append(TokenPart(item, item))
    return parts


def _bounds(item: ScheduledRequest, num_contexts: int, block_size: int) -> list[int]:
    """Context i has tokens from position `bounds[i]` to `bounds[i + 1] - 1`; none = the last one has all."""
    if item.scores_prompt or item.num_drafts or item.num_tokens < num_contexts * block_size:
        return []
    ends = (item.start * num_contexts + item.num_tokens * part for part in range(1, num_contexts))
    unit = block_size * num_contexts
    return [item.start, *((2 * end + unit) // (2 * unit) * block_size for end in ends), item.end]


def tables_with_cuts(
    tables: npt.NDArray[np.int32], last_blocks: npt.NDArray[np.int32], parts: Sequence[TokenPart], block_size: int
) -> npt.NDArray[np.int32]:
    """Block tables [num_requests, num_blocks] of a state that is kept after some blocks only, by which a part finds the
    state of the one before: where none is kept after a cut, it is in the block of the step's last token until that is
    computed.

    Args:
        last_blocks: of each request that block.
    """
    found = tables.copy()
    for row, part in enumerate(parts):
        for cut in part.cuts:
            block = cut // block_size - 1
            if found[row, block] == NULL_BLOCK:
                found[row, block] = last_blocks[row]
    return found


class ContextTurns:
    """The order in which ranks with consecutive tokens of a step write what a layer keeps of them."""

    def __init__(self, links: RankLinks) -> None:
        self._before, self._after = links.before, links.after
        self._word = torch.zeros(1, 1)

    def take(self) -> None:
        """Waits until the rank with the tokens before has written a further layer.

        Raises:
            EngineStoppedError: a rank is lost or late.
        """
        if self._before is not None:
            self._before.receive(self._word)

    def pass_on(self) -> None:
        """Tells the rank with the next tokens that this layer is written; raises as `take`."""
        if self._after is not None:
            self._after.send(self._word)
