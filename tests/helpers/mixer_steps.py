"""Steps of a single token mixer over an arena whose every byte is NaN until it is written, and again once released."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from tandem.architecture.mixers import MixerSpec
from tandem.compute.arena import Arena
from tandem.compute.attention import prepare_by_state
from tandem.compute.backends import choose_backends
from tandem.compute.ops import Kernels
from tandem.compute.step import AttentionBatch
from tandem.kvcache.spec import build_layout
from tandem.models.layers.mixers import build_mixer, of_states, params_by_state
from tandem.models.layers.rotary import build_rotary_tables
from tests.helpers.parameters import dense_parameters

_CPU = torch.device("cpu")


@dataclass(eq=False)
class Request:
    """`tables`: blocks by group; released ones are 0. `keeps`: it releases none."""

    tables: list[list[int]]
    keeps: bool = False
    length: int = 0
    shared: set[int] = field(default_factory=set)


class MixerSteps:
    """`backend`: name of an attention backend."""

    def __init__(
        self,
        spec: MixerSpec,
        tensors: Mapping[str, torch.Tensor],
        kernels: Kernels,
        *,
        backend: str,
        block_size: int = 8,
        dtype: str = "float32",
        max_positions: int = 512,
        num_pages: int = 600,
    ) -> None:
        parameters = dense_parameters(tensors, kernels)
        self.mixer = build_mixer(spec, parameters, build_rotary_tables([spec.rope], max_positions, _CPU), kernels)
        states = spec.states(dtype)
        self.layout = build_layout(states, block_size)
        self._states = range(len(states))
        self._group_of = [self.layout.group_of_layer(state)[0] for state in self._states]
        pages = torch.full((num_pages, self.layout.page_bytes), 0xFF, dtype=torch.uint8)
        self._arena = Arena(self.layout, num_pages, _CPU, pages, keeps_pages=True)
        self._free = list(range(1, num_pages))
        random.Random(0).shuffle(self._free)
        chosen = choose_backends(backend, _CPU, self.layout, 0.0, sinks=spec.sinks is not None)
        self._backends: list[Any] = [chosen[type(state)] for state in states]

    def begin(self, *, keeps: bool = False) -> Request:
        return Request([[] for _ in self.layout.groups], keeps)

    def go_on(self, request: Request, length: int) -> Request:
        """A request that shares the blocks that a query behind `length` tokens sees, whole blocks."""
        assert length % self.layout.block_size == 0
        end, other = length // self.layout.block_size, self.begin()
        for group, table in enumerate(request.tables):
            first = self.layout.first_needed(group, length)
            assert 0 not in table[first:end], "released"
            other.tables[group] = [0] * first + table[first:end]
            other.shared |= {*table[first:end]}
        other.length = length
        return other

    def step(self, *work: tuple[Request, torch.Tensor]) -> list[torch.Tensor]:
        """Computes the next hidden states of requests in one step; returns what the mixer gives for each."""
        batches = [self._batch(group, work) for group in range(len(self.layout.groups))]
        positions = torch.cat([torch.arange(each.length, each.length + len(x)) for each, x in work])
        readers = [set[Any]() for _ in self._states]
        for state, params in zip(self._states, params_by_state(self.mixer, self._states), strict=True):
            readers[state].add(params)
        by_state = {state: batches[self._group_of[state]] for state in self._states}
        prepared = prepare_by_state(self._backends, by_state, self._arena.layers, readers)
        given = [of_states(found, self._states) for found in (self._arena.layers, prepared, self._backends)]
        views, batched, backends = given
        queries = self.mixer.write(torch.cat([x for _, x in work]), positions, views, batched, backends)
        out = self.mixer.attend(queries, views, batched, backends, {})
        for each, x in work:
            each.length += len(x)
            self._release(each)
        return list(torch.split(out, [len(x) for _, x in work]))

    def whole(self, x: torch.Tensor, cuts: Sequence[int] = ()) -> torch.Tensor:
        """Output of the mixer for a request of all of `x`, in steps that end at `cuts`."""
        request, bounds = self.begin(), [0, *cuts, len(x)]
        found = [self.step((request, x[start:end]))[0] for start, end in pairwise(bounds)]
        self.end(request)
        return torch.cat(found)

    def verify(self, request: Request, x: torch.Tensor, num_accepted: int) -> torch.Tensor:
        """As `step` of one request, of which only the first tokens stay."""
        kept, request.keeps = request.keeps, True
        (found,) = self.step((request, x))
        request.length -= len(x) - num_accepted
        request.keeps = kept
        self._release(request)
        return found[:num_accepted]

    def end(self, request: Request) -> None:
        """Release all blocks of its own."""
        for table in request.tables:
            self._drop(request, table, len(table))

    def _batch(self, group: int, work: Sequence[tuple[Request, torch.Tensor]]) -> AttentionBatch:
        size, slots, tables = self.layout.block_size, [], []
        for request, x in work:
            table, end = request.tables[group], request.length + len(x)
            while len(table) * size < end:
                table.append(self._free.pop())
            slots += [table[position // size] * size + position % size for position in range(request.length, end)]
            tables.append(table)
        widest, lengths = max(map(len, tables)), [len(x) for _, x in work]
        ends = [request.length + len(x) for request, x in work]
        return AttentionBatch(
            query_start=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
            seq_lens=torch.tensor(ends, dtype=torch.int32),
            block_tables=torch.tensor([table + [0] * (widest - len(table)) for table in tables], dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
            max_query_len=max(lengths),
            max_seq_len=max(ends),
        )

    def _release(self, request: Request) -> None:
        for group, table in enumerate(() if request.keeps else request.tables):
            self._drop(request, table, min(len(table), self.layout.first_needed(group, request.length)))

    def _drop(self, request: Request, table: list[int], end: int) -> None:
        for index, block in enumerate(table[:end]):
            if block and block not in request.shared:
                self._arena.pages[block] = 0xFF
                self._free.insert(0, block)
            table[index] = 0
