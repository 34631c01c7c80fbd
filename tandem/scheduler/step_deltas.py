"""Differences between steps: records what the executor knows of each request, so that steps carry changes only."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tandem.kvcache.block_table import BlockTable
from tandem.scheduler.output import NewBlocks, NewRequest, ScheduledRequest
from tandem.scheduler.request import Request

PagesOf = Callable[[Sequence[Sequence[int]]], Mapping[int, Sequence[int]]]
"""Takes block ids by KV group; returns, by block id, the pages of those blocks that have several."""


@dataclass(slots=True)
class TableChanges:
    """Remembers how much of one request's block table was sent, and returns the changes since then.

    Args:
        num_blocks: entries sent, in each group.
        num_dropped: how many of them were sent as dropped, by group.
    """

    num_blocks: int = 0
    num_dropped: Sequence[int] = ()

    def of(self, table: BlockTable, pages_of: PagesOf) -> NewBlocks | None:
        """Returns the changes, which count as sent; None if there are none."""
        if self.num_blocks == len(table.groups[0]) and self.num_dropped == table.num_dropped:
            return None
        added = tuple(ids[self.num_blocks :] for ids in table.groups)
        blocks = NewBlocks(added, tuple(table.num_dropped), pages_of(added))
        self.num_blocks, self.num_dropped = len(table.groups[0]), list(table.num_dropped)
        return blocks


class StepDeltas:
    """Turns requests and their block tables into the data of a step. `pages_of`: looks up pages in the tables' pool."""

    def __init__(self, pages_of: PagesOf) -> None:
        self._pages_of = pages_of
        self._told: dict[str, TableChanges] = {}
        self._new: list[NewRequest] = []

    def schedule(self, request: Request, num_tokens: int, table: BlockTable) -> ScheduledRequest:
        """Returns the step data of the next `num_tokens` tokens, drafts included. If the executor does not know the
        request, its description joins those that `take_new` returns.
        """
        told = self._told.get(request.request_id)
        if told is None:
            told = self._told[request.request_id] = TableChanges()
            self._new.append(_describe(request))
        start, token_ids = request.num_computed_tokens, request.token_ids
        end = start + num_tokens
        blocks = told.of(table, self._pages_of)
        # NOTE: the first test decides for nearly all requests, and a call of the property costs a tenth of this method
        scores_prompt = request.params.prompt_logprobs is not None and request.needs_whole_prompt
        scheduled, num_drafts = token_ids[start:end].tolist(), max(0, end - len(token_ids))
        if num_drafts:
            scheduled += request.draft_token_ids[:num_drafts]
        samples = end >= len(token_ids)
        return ScheduledRequest(request.request_id, start, scheduled, samples, scores_prompt, blocks, num_drafts)

    def take_new(self) -> tuple[NewRequest, ...]:
        """Returns the descriptions of requests first scheduled since the last call."""
        new, self._new = tuple(self._new), []
        return new

    def forget(self, request_id: str) -> None:
        """Forget a request that the executor releases; if scheduled again, it is described again."""
        self._told.pop(request_id, None)

    @property
    def request_ids(self) -> set[str]:
        """Ids of the requests that the executor knows."""
        return set(self._told)


def _describe(request: Request) -> NewRequest:
    return NewRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=request.output_token_ids,
        params=request.params,
        seed=request.seed,
        eos_token_ids=request.eos_token_ids,
        hash_root=request.hash_root,
    )
