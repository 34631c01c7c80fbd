"""Context parallelism: divides a step's prompts into runs of consecutive tokens (*parts*), one for each *context*.

A context is a rank of the group, or several that split the layers' heads. It computes its part like a smaller chunk,
which changes no bit. In each layer contexts write KV to shared memory in the order of the tokens, so each finds the KV
of all tokens before its own. Each waits for its predecessor only.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from tandem.compute.collectives import RankLinks, StagePipe
from tandem.kvcache.prefix import NULL_BLOCK
from tandem.scheduler.output import ScheduledRequest


@dataclass(frozen=True, slots=True)
class TokenPart:
    """Consecutive tokens of a scheduled request, in one micro-batch or in one context of it.

    Args:
        item: the request reduced to these tokens.
        whole: the request as the step schedules it.
    """

    item: ScheduledRequest
    whole: ScheduledRequest

    @property
    def cuts(self) -> list[int]:
        """Positions at which tokens of another part end or begin."""
        starts = [self.item.start] if self.item.start > self.whole.start else []
        return [*starts, self.item.end] if self.item.end < self.whole.end else starts


def token_parts(
    pieces: Sequence[TokenPart], context: int, num_contexts: int, block_size: int
) -> list[TokenPart] | None:
    """Divides the parts `pieces` of one micro-batch further; returns the parts that context `context` computes. None =
    nothing is divided: the last context computes all.

    Parts have similar numbers of tokens and end at block boundaries. The last context has all tokens whose logits
    are needed.
    """
    bounds = [_bounds(piece.item, num_contexts, block_size) for piece in pieces]
    if not any(bounds):
        return None
    parts = []
    for piece, cuts in zip(pieces, bounds, strict=True):
        item, is_last = piece.item, context + 1 == num_contexts
        if cuts:
            first, end = cuts[context], cuts[context + 1]
            tokens = item.token_ids[first - item.start : end - item.start]
            own = replace(item, start=first, token_ids=tokens, samples=item.samples and is_last)
            parts.append(TokenPart(own, piece.whole))
        elif is_last:
            parts.append(piece)
    return parts


def _bounds(item: ScheduledRequest, num_contexts: int, block_size: int) -> list[int]:
    """Bounds of the parts: context i has tokens from position `bounds[i]` to `bounds[i + 1] - 1`. []: not divided."""
    if item.scores_prompt or item.num_drafts or item.num_tokens < num_contexts * block_size:
        return []
    ends = (item.start * num_contexts + item.num_tokens * part for part in range(1, num_contexts))
    unit = block_size * num_contexts
    return [item.start, *((2 * end + unit) // (2 * unit) * block_size for end in ends), item.end]


def tables_with_cuts(
    tables: npt.NDArray[np.int32], last_blocks: npt.NDArray[np.int32], parts: Sequence[TokenPart], block_size: int
) -> npt.NDArray[np.int32]:
    """Block tables [num_requests, num_blocks] of a recurrent state, completed so that each part finds the state after
    the part before it. If no block after a cut keeps that state, it is in the block of the step's last token meanwhile.

    Args:
        last_blocks: the block of the step's last token, of each request.
    """
    found = tables.copy()
    for row, part in enumerate(parts):
        for cut in part.cuts:
            block = cut // block_size - 1
            if found[row, block] == NULL_BLOCK:
                found[row, block] = last_blocks[row]
    return found


class ContextTurns:
    """The order in which contexts with consecutive tokens write a layer's KV. `earlier`, `later`: pipes from the
    context with the tokens before and to the one with the tokens after; None = there is none in this step. Each layer
    calls `take` before it writes its KV, and `pass_on` after it.
    """

    def __init__(self, earlier: StagePipe | None, later: StagePipe | None) -> None:
        self._earlier, self._later = earlier, later
        self._word = torch.zeros(1, 1)

    def take(self) -> None:
        """Waits until the context with the tokens before has written the next layer.

        Raises:
            EngineStoppedError: a rank is lost or late.
        """
        if self._earlier is not None:
            self._earlier.receive(self._word)

    def pass_on(self) -> None:
        """Tells the context with the next tokens that this layer is written. Raises `EngineStoppedError` as `take`
        does.
        """
        if self._later is not None:
            self._later.send(self._word)


def parts_in_turn(
    batches: Sequence[Sequence[TokenPart]], links: RankLinks, block_size: int
) -> Iterator[tuple[Sequence[TokenPart], ContextTurns | None]]:
    """For each micro-batch in order, the parts that this context computes and its turns; turns are None if it neither
    waits nor is waited for. Micro-batches of which it computes nothing are left out.

    NOTE: the first context waits for the last one's KV of the previous micro-batch.
    """
    own = [token_parts(batch, links.context, links.num_contexts, block_size) for batch in batches]
    for index, (whole, parts) in enumerate(zip(batches, own, strict=True)):
        is_followed = index + 1 < len(own) and own[index + 1] is not None
        if not links.has_last_tokens:
            if parts is not None:
                yield parts, ContextTurns(links.earlier if links.context or index else None, links.later)
        else:
            earlier, later = None if parts is None else links.earlier, links.later if is_followed else None
            waits = earlier is not None or later is not None
            yield parts or whole, ContextTurns(earlier, later) if waits else None
