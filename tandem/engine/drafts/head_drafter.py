"""Drafter by a head: guesses from the served model's own hidden states (MTP, EAGLE-3).

A head is a small network whose input is rows: row i of a request is the served model's hidden states at position
`first + i` and the token after it. Rows wait until guesses are asked for, or until they fill a step, so prompts are
computed in chunks and answers without drafts cost little. A request's rows continue another worker's `DraftState`, or a
cached prefix of rows. Without either they start at the first position that this worker computes. Rotary embeddings see
distances only, so rows are counted from there. A block of rows depends on the token after it too, so its hash covers
that token.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from tandem.compute.arena import Arena
from tandem.compute.attention import Backends
from tandem.engine.drafts.drafter import DraftState
from tandem.engine.drafts.drawing import drawing_state
from tandem.engine.drafts.head_rows import HeadRows, joined, root_of_rows
from tandem.engine.inputs import InputBuilder
from tandem.engine.sampler import Sampler
from tandem.kvcache.manager import KVCacheManager
from tandem.kvcache.prefix import PrefixMatch
from tandem.models.heads.base import Head
from tandem.scheduler.output import NewRequest, SampledToken, ScheduledRequest, SchedulerOutput
from tandem.scheduler.step_deltas import TableChanges

_MOST_OBSERVED = 64  # rows of steps kept before they are sorted by request


class HeadDrafter:
    """Implements `Drafter`, `StateReader` and `StateCarrier`, which `drafter` describes. Guesses are drawn with the
    random numbers of the request, as in `ModelDrafter`.

    Args:
        head: guesses.
        arena: memory of the rows' states, of one layer.
        kv: its blocks.
        backends: attention over it.
        sampler: draws the guesses.
        vocab_size: of the served model.
        max_num_requests: requests that are followed at once.
        max_model_len: longest request in tokens.
        fingerprint: as of `StateCarrier`.
    """

    def __init__(
        self,
        head: Head,
        arena: Arena,
        kv: KVCacheManager,
        backends: Backends,
        sampler: Sampler,
        *,
        vocab_size: int,
        max_num_requests: int,
        max_model_len: int,
        fingerprint: str,
    ) -> None:
        self.fingerprint = fingerprint
        self._head = head
        self._arena = arena
        self._kv = kv
        self._backends = backends
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._max_rows = max_model_len
        self._inputs = InputBuilder(
            arena.layout,
            max_num_requests=max_num_requests,
            max_model_len=max_model_len,
            device=arena.pages.device,
            wanted_groups=(0,),
        )
        self._followed: dict[str, HeadRows] = {}
        self._taken: dict[str, DraftState] = {}
        self._released: list[str] = []
        self._observed: list[tuple[Sequence[ScheduledRequest], Sequence[int], torch.Tensor]] = []
        self._num_observed = 0  # rows of these

    @property
    def layers(self) -> tuple[int, ...]:
        return self._head.layers_read

    def begin(self, request: NewRequest) -> None:
        token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        followed = self._followed[request.request_id] = HeadRows(
            request.request_id,
            token_ids,
            len(request.prompt_token_ids),
            drawing_state(request, self._vocab_size),
            root_of_rows(request.hash_root, token_ids[:1]),
        )
        state = self._taken.pop(request.request_id, None)
        if state is not None:
            self._resume(followed, state)

    def observe(self, step: SchedulerOutput, first_tokens: Sequence[int], states: torch.Tensor) -> None:
        """Store the hidden states of a step. If more rows wait than fit into a chunk, they are computed.

        NOTE: of most steps nothing else is done, which is what an answer costs that nobody drafts for.
        """
        self._observed.append((step.scheduled, first_tokens, states))
        self._num_observed += len(states)
        if self._num_observed >= _MOST_OBSERVED:
            self._sort_observed()
            if sum(followed.num_waiting for followed in self._followed.values()) > self._kv.max_chunk_tokens:
                self._catch_up(self._followed.values())

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._followed[request_id].token_ids += token_ids

    @torch.inference_mode()
    def draft(self, limits: Mapping[str, int]) -> Mapping[str, Sequence[int]]:
        """Guess with one step for the waiting rows, and one more for each further token of the guesses. Requests
        without new hidden states, or without room in the pool, are left out.
        """
        guesses: dict[str, list[int]] = {}
        self._sort_observed()
        growing, hidden = self._catch_up(self._followed[request_id] for request_id in limits)
        depth = 0
        while growing:
            drawn = self._draw(growing, hidden, depth)
            good = [index for index, token in enumerate(drawn) if token.is_token]
            growing, hidden = [growing[index] for index in good], hidden[good]
            for followed, index in zip(growing, good, strict=True):
                guesses.setdefault(followed.request_id, []).append(drawn[index].token_id)
            depth += 1
            growing, hidden = self._compute_guesses(growing, hidden, guesses, limits, depth)
        return guesses

    def end(self, request_id: str) -> None:
        self._sort_observed()  # NOTE: a request of this name may begin again, at another position
        self._forget(self._followed.pop(request_id))

    @torch.inference_mode()
    def give(self, request_id: str) -> DraftState | None:
        followed = self._followed.get(request_id)
        if followed is None:
            return None
        self._sort_observed()
        self._catch_up([followed])
        if followed.first is None or followed.first + followed.num_computed != len(followed.token_ids) - 1:
            return None
        assert followed.table is not None
        (blocks,) = followed.table.groups
        held = blocks[: math.ceil(followed.num_computed / self._kv.layout.block_size)]
        if not all(held):  # NOTE: what no further row attends to was released
            return None
        return DraftState(followed.first, followed.num_computed, self._arena.pages[held.tolist()].view(-1))

    def take(self, request_id: str, state: DraftState) -> None:
        self._taken[request_id] = state

    def forget(self, request_id: str) -> None:
        self._taken.pop(request_id, None)

    def check(self) -> None:
        """Check that the blocks are accounted for.

        Raises:
            AssertionError: they are not.
        """
        self._kv.check()
        assert self._followed or self._kv.usage.used == 0, "blocks of the head are used by nobody"

    @torch.inference_mode()
    def _sort_observed(self) -> None:
        """Hand the states of the steps since the last call to their requests."""
        for scheduled, first_tokens, states in self._observed:
            for item, row in zip(scheduled, first_tokens, strict=True):
                followed = self._followed.get(item.request_id)
                if followed is not None:
                    own = states[row : row + item.num_tokens]
                    self._add(followed, item.start, own if len(own) == len(states) else own.clone())
        self._observed.clear()
        self._num_observed = 0

    def _resume(self, followed: HeadRows, state: DraftState) -> None:
        """Go on behind rows that another worker computed, if they are what is missing and there is room for them."""
        num_blocks = math.ceil(state.num_rows / self._kv.layout.block_size)
        is_whole = state.first >= 0 and state.first + state.num_rows == len(followed.token_ids) - 1
        if not is_whole or state.data.numel() != num_blocks * self._kv.layout.page_bytes:
            return
        if not self._grow(followed, state.num_rows):
            self._forget(followed)
            return
        assert followed.table is not None
        (blocks,) = followed.table.groups
        self._arena.pages[blocks[:num_blocks].tolist()] = state.data.view(num_blocks, -1)
        followed.first, followed.num_computed = state.first, state.num_rows

    def _start(self, followed: HeadRows, position: int) -> None:
        """Begin a request whose states come from `position` on: behind its cached rows if they reach so far, else
        cold.
        """
        followed.first = position
        followed.extend_hashes(self._kv.layout.block_size)
        match = self._kv.match(followed.block_hashes, position + 1)
        if position and match.num_blocks * self._kv.layout.block_size == position and self._admit(followed, match, 0):
            followed.first, followed.num_computed = 0, position

    def _add(self, followed: HeadRows, position: int, states: torch.Tensor) -> None:
        """Add the states from `position` on. Those of wrong guesses that wait there are replaced."""
        if not followed.follows(position):
            self._forget(followed)
            self._start(followed, position)
        assert followed.first is not None
        followed.keep(position - followed.first - followed.num_computed)
        followed.add(states)

    def _forget(self, followed: HeadRows) -> None:
        """Forget the rows of a request, and release its blocks."""
        followed.forget()
        if followed.table is not None:
            self._kv.release(followed.request_id)
            self._released.append(followed.request_id)
            followed.table, followed.changes = None, TableChanges()

    def _catch_up(self, requests: Iterable[HeadRows]) -> tuple[list[HeadRows], torch.Tensor]:
        """Compute the waiting rows whose token is known, of requests that have some. Returns these requests, and what
        the head gave for the last row of each.
        """
        ready = [followed for followed in requests if followed.num_ready > 0 and self._has_room(followed)]
        items, states = [], []
        for followed in ready:
            assert followed.first is not None
            num_rows, start = followed.num_ready, followed.num_computed
            behind = followed.first + start + 1
            items.append(self._item(followed, start, followed.token_ids[behind : behind + num_rows]))
            states.append(followed.split(num_rows))
            followed.num_computed += num_rows
            self._publish(followed)
        return ready, self._forward(items, [self._head.fuse(rows) for rows in states])

    def _compute_guesses(
        self,
        requests: Sequence[HeadRows],
        hidden: torch.Tensor,
        guesses: Mapping[str, Sequence[int]],
        limits: Mapping[str, int],
        depth: int,
    ) -> tuple[list[HeadRows], torch.Tensor]:
        """Compute the rows of the last guesses, of requests that may have more than `depth` and have room for it.

        Their states are overwritten by those of the tokens that are chosen.
        """
        growing, items, rows = [], [], []
        for index, followed in enumerate(requests):
            start = followed.num_computed + depth - 1
            is_wanted = depth < limits[followed.request_id] and start < self._max_rows
            # NOTE: what no row from the last known one on attends to may be released, whatever becomes of guesses
            if is_wanted and self._kv.grow(followed.request_id, followed.num_computed - 1, start + 1):
                growing.append(followed)
                items.append(self._item(followed, start, guesses[followed.request_id][-1:]))
                rows.append(hidden[index : index + 1])
        return growing, self._forward(items, rows)

    def _has_room(self, followed: HeadRows) -> bool:
        """Whether the pool has blocks for the rows that are ready; a request without is forgotten, to start cold."""
        if self._grow(followed, followed.num_computed + followed.num_ready):
            return True
        self._forget(followed)
        return False

    def _grow(self, followed: HeadRows, end: int) -> bool:
        """Whether the request has blocks for its first `end` rows, from now on at the latest."""
        if followed.table is None and not self._admit(followed, self._kv.match((), 1), end):
            return False
        return self._kv.grow(followed.request_id, followed.num_computed, end)

    def _admit(self, followed: HeadRows, match: PrefixMatch, end: int) -> bool:
        """Whether there is room for the request's table, of `match` and for `end` rows."""
        if not self._kv.can_admit(match, end):
            return False
        followed.table = self._kv.admit(followed.request_id, match, (), end)
        return True

    def _publish(self, followed: HeadRows) -> None:
        """Offer whole blocks of rows to later requests, which look for some only once these are computed."""
        if followed.first == 0:
            followed.extend_hashes(self._kv.layout.block_size)
            self._kv.commit(followed.request_id, followed.block_hashes, followed.num_computed)

    def _item(self, followed: HeadRows, start: int, token_ids: Sequence[int]) -> ScheduledRequest:
        assert followed.table is not None
        blocks = followed.changes.of(followed.table, self._kv.pages_of)
        return ScheduledRequest(followed.request_id, start, token_ids, samples=True, blocks=blocks)

    def _forward(self, items: Sequence[ScheduledRequest], hidden: Sequence[torch.Tensor]) -> torch.Tensor:
        """Compute rows, given the hidden states of each request's; returns those of the last row of each."""
        if not items:
            return torch.empty(0)
        released, self._released = tuple(self._released), []
        inputs = self._inputs.build(SchedulerOutput((), tuple(items), released))
        in_order = sorted(range(len(items)), key=inputs.first_tokens.__getitem__)
        rows = joined([hidden[index] for index in in_order])
        found = self._head.forward(
            inputs.input_ids, inputs.positions, rows, self._arena.layers, inputs.batches[0], self._backends
        )
        last = [first + item.num_tokens - 1 for first, item in zip(inputs.first_tokens, items, strict=True)]
        return found[last]

    def _draw(self, requests: Sequence[HeadRows], hidden: torch.Tensor, depth: int) -> Sequence[SampledToken]:
        for followed in requests:
            followed.state.num_output_tokens = len(followed.token_ids) - followed.num_prompt_tokens + depth
        logits = self._head.logits(hidden)[:, : self._vocab_size]
        return self._sampler.sample(logits, [followed.state for followed in requests])
