"""Parts of prompts: every token once, in order, and a place for the state that one part leaves to the next."""

import random
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.compute.collectives import Collectives, RankLinks
from tandem.engine.stage_flow import micro_batches
from tandem.engine.token_parts import TokenPart, parts_in_turn, tables_with_cuts, token_parts
from tandem.scheduler.output import ScheduledRequest, SchedulerOutput

BLOCK = 16
NO_GROUP = cast(Collectives, None)  # nothing here exchanges with all ranks


def chunk(start: int, num_tokens: int, **options: Any) -> ScheduledRequest:
    return ScheduledRequest("r", start, list(range(start, start + num_tokens)), samples=True, **options)


def wholes(*items: ScheduledRequest) -> list[TokenPart]:
    return [TokenPart(item, item) for item in items]


@given(
    start=st.integers(0, 300),
    num_tokens=st.integers(1, 600),
    num_contexts=st.integers(2, 8),
    block_size=st.sampled_from([1, 8, 16, 64]),
)
def test_the_parts_of_a_chunk_are_the_chunk(start: int, num_tokens: int, num_contexts: int, block_size: int) -> None:
    whole = chunk(start, num_tokens)
    found = [
        token_parts([TokenPart(whole, whole)], context, num_contexts, block_size) for context in range(num_contexts)
    ]
    if num_tokens < num_contexts * block_size:
        assert found == [None] * num_contexts
        return
    parts = [part for parts in found for part in parts or ()]
    assert len(parts) == num_contexts
    assert [token for part in parts for token in part.item.token_ids] == whole.token_ids
    assert all(part.item.start == part.item.token_ids[0] for part in parts)
    assert [part.item.samples for part in parts] == [False] * (num_contexts - 1) + [True]
    inner = [part.item.start for part in parts[1:]]
    assert all(cut % block_size == 0 for cut in inner)
    assert [cut for part in parts for cut in part.cuts] == [cut for cut in inner for _ in range(2)]
    sizes = [part.item.num_tokens for part in parts]
    assert max(sizes) - min(sizes) <= 2 * block_size


def test_the_last_context_has_what_is_not_divided() -> None:
    """Drafts and prompts that are scored, whose logits are all asked for, and what is too short."""
    undivided = wholes(chunk(0, 200, scores_prompt=True), chunk(10, 64, num_drafts=2), chunk(3, 31))
    assert token_parts(undivided, 0, 2, 16) is token_parts(undivided, 1, 2, 16) is None
    step = [*undivided, *wholes(chunk(0, 32))]
    first, last = (token_parts(step, context, 2, 16) for context in range(2))
    assert first == [TokenPart(ScheduledRequest("r", 0, list(range(16)), samples=False), step[3].whole)]
    assert last is not None
    assert last[:3] == undivided
    assert last[3].item == ScheduledRequest("r", 16, list(range(16, 32)), samples=True)


@pytest.mark.parametrize("kept", [0, 40])
def test_a_state_goes_from_one_part_to_the_next_where_both_look_for_it(kept: int) -> None:
    """In the block that is kept after the cut, or else in that of the last token."""
    whole = chunk(30, 70)  # blocks 1 to 6 of 16 tokens, the last one begun
    table = np.array([[9, 8, 0, kept, 0, 0, 7]], dtype=np.int32)
    last_blocks = np.array([7], dtype=np.int32)
    found = []
    for context in range(2):
        parts = token_parts(wholes(whole), context, 2, 16)
        assert parts is not None
        num_blocks = -(-parts[0].item.end // 16)
        found.append(tables_with_cuts(table[:, :num_blocks], last_blocks, parts, 16)[0].tolist())
    assert found == [[9, 8, 0, kept or 7], [9, 8, 0, kept or 7, 0, 0, 7]]
    assert table[0].tolist() == [9, 8, 0, kept, 0, 0, 7], "the table of the request stays"


class Recorded:
    """A pipe that notes who uses it, in place of moving anything."""

    def __init__(self, name: str, operations: list[str]) -> None:
        self._name, self._operations = name, operations

    def send(self, rows: torch.Tensor) -> None:
        self._operations.append(f"send {self._name}")

    def receive(self, rows: torch.Tensor) -> torch.Tensor:
        self._operations.append(f"receive {self._name}")
        return rows


def layer_operations(
    batches: list[list[TokenPart]], context: int, num_contexts: int, num_layers: int
) -> list[str | tuple[int, str, int, int]]:
    """Of one context in a step, in order: uses of pipes, and in each layer what is written of which request."""
    operations: list[Any] = []
    earlier, later = (Recorded(str(sender % num_contexts), operations) for sender in (context - 1, context))
    links = RankLinks(NO_GROUP, NO_GROUP, earlier=earlier, later=later, context=context, num_contexts=num_contexts)
    for parts, turns in parts_in_turn(batches, links, BLOCK):
        for layer in range(num_layers):
            if turns is not None:
                turns.take()
            operations += [(layer, part.item.request_id, part.item.start, part.item.end) for part in parts]
            if turns is not None:
                turns.pass_on()
    return operations


@pytest.mark.parametrize("seed", range(40))
def test_every_layer_is_written_in_the_order_of_tokens_whoever_is_faster(seed: int) -> None:
    """Over micro-batches of long and short requests, with pipes that hold one word: none waits for ever, no word is
    left, and no token is written before one that precedes it.
    """
    rng = random.Random(seed)
    num_contexts, num_layers = rng.randint(2, 4), 3
    items = [
        ScheduledRequest(
            f"r{number}", rng.randrange(100), [7] * rng.choice([1, 1, 20, 150, 700]), samples=True,
            scores_prompt=rng.random() < 0.2,
        )
        for number in range(rng.randint(1, 6))
    ]  # fmt: skip
    step = SchedulerOutput((), tuple(items), ())
    batches = list(micro_batches(step, rng.randint(2, 4), BLOCK))
    left = [layer_operations(batches, context, num_contexts, num_layers) for context in range(num_contexts)]
    written = {(layer, item.request_id): item.start for layer in range(num_layers) for item in items}
    words = dict.fromkeys(map(str, range(num_contexts)), 0)
    while any(left):
        possible = [own for own in left if own and can_go_on(own[0], words)]
        assert possible, f"all wait: {[own[:1] for own in left]}"
        operation = rng.choice(possible).pop(0)
        if isinstance(operation, str):
            verb, name = operation.split()
            words[name] += 1 if verb == "send" else -1
        else:
            layer, name, start, end = operation
            assert written[layer, name] == start
            written[layer, name] = end
    assert written == {(layer, item.request_id): item.end for layer in range(num_layers) for item in items}
    assert not any(words.values())


def can_go_on(operation: str | tuple[int, str, int, int], words: dict[str, int]) -> bool:
    if not isinstance(operation, str):
        return True
    verb, name = operation.split()
    return words[name] == (0 if verb == "send" else 1)
