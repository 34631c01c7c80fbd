"""States of heads that are given, lent in pages of the model's pool, and taken, or not."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.architecture.state import KVSpec
from tandem.compute.arena import Arena
from tandem.compute.ranked_pages import RankedPages
from tandem.core.sampling_params import SamplingParams
from tandem.engine.drafts.drafter import DraftState
from tandem.engine.drafts.hand_over import DraftHandOver
from tandem.engine.drafts.head_drafter import HeadDrafter
from tandem.kvcache.manager import KVCacheManager
from tandem.kvcache.spec import build_layout
from tandem.scheduler.output import NewRequest, ScheduledRequest, SchedulerOutput
from tests.helpers.checkpoints import save_tiny_llama
from tests.helpers.head_drafters import head_drafter
from tests.helpers.heads import save_eagle3

REQUEST = NewRequest("r", list(range(7, 39)), [], SamplingParams(temperature=0.0), 0, frozenset(), b"")


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    directory = tmp_path_factory.mktemp("eagle")
    model = save_tiny_llama(directory / "llama", num_hidden_layers=3)
    return model, f"eagle={save_eagle3(directory / 'head', model)}"


def state_of(drafter: HeadDrafter) -> DraftState:
    """Of `REQUEST`, which stays, behind one token."""
    drafter.begin(REQUEST)
    item = ScheduledRequest("r", 0, REQUEST.prompt_token_ids, samples=True)
    drafter.observe(SchedulerOutput((), (item,), ()), [0], torch.ones(32, 192))
    drafter.extend("r", [7])
    state = drafter.give("r")
    assert state is not None
    return state


def test_a_state_without_room_or_of_another_length_is_not_taken(eagle: tuple[Path, str]) -> None:
    source, crowded = (head_drafter(*eagle, num_blocks=num_blocks) for num_blocks in (8, 3))
    state = state_of(source)
    assert (state.first, state.num_rows) == (0, 32)
    further = replace(REQUEST, output_token_ids=[7])
    for drafter, asked, taken in (
        (source, further, state),
        (source, further, replace(state, num_rows=31)),
        (source, further, replace(state, data=state.data[1:])),
        (source, REQUEST, state),
        (crowded, further, state),
    ):
        drafter.take("s", taken)
        drafter.begin(replace(asked, request_id="s"))
        found = drafter.give("s")
        assert (found is not None) == (taken is state and asked is further and drafter is source)
        assert found is None or torch.equal(found.data, state.data)
        drafter.end("s")
    source.end("r")
    source.check()
    crowded.check()


def test_a_state_is_lent_in_pages_while_there_are_some(eagle: tuple[Path, str]) -> None:
    """And its lease is all that holds them."""
    drafter = head_drafter(*eagle)
    state = state_of(drafter)
    layout = build_layout((KVSpec(1, 4, "float32"),), 8)
    kv = KVCacheManager(layout, 200, max_chunk_tokens=32)
    num_pages = -(-state.data.numel() // layout.page_bytes)
    assert 1 < num_pages < 200
    spent: list[float] = []
    hand_over = DraftHandOver(drafter, kv, RankedPages.of(Arena(layout, 201, torch.device("cpu"))), spent.append)
    assert hand_over.lent("r") is None
    hand_over.lending("r", "lease")(True)
    ended = hand_over.lent("r")
    assert ended is not None
    assert (ended.result(0), kv.usage.leased) == (None, 0), "a lease that had ended held pages for ever"
    kv.admit("owner", kv.match((), 1), (), 8)
    assert kv.grow("owner", 0, 8)
    for num_taken in (0, 200 - num_pages):
        kv.lease("owner", 8, 0, 1, "lease")
        taken = kv.borrow("others", num_taken)
        hand_over.lending("r", "lease")(True)
        lending = hand_over.lent("r")
        assert lending is not None
        lent = lending.result(0)
        assert (lent is None) == bool(num_taken)
        assert kv.usage.leased == 1 + (0 if lent is None else num_pages)
        if lent is not None:
            hand_over.take("s", lent)
            drafter.begin(replace(REQUEST, request_id="s", output_token_ids=[7]))
            found = drafter.give("s")
            assert found is not None
            assert torch.equal(found.data, state.data)
            drafter.end("s")
        kv.drop("lease")
        kv.drop("others")
        assert len(taken) == num_taken
        kv.check()
    hand_over.lending("unknown", "lease")(True)
    unknown = hand_over.lent("unknown")
    assert unknown is not None
    assert unknown.result(0) is None
    assert hand_over.lent("unknown") is None
    assert len(spent) == 4
    assert min(spent) > 0


@pytest.mark.parametrize("is_running", [False, True])
def test_who_waits_for_a_state_hears_of_an_engine_that_ends(
    eagle: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, is_running: bool
) -> None:
    drafter = head_drafter(*eagle)
    state_of(drafter)
    layout = build_layout((KVSpec(1, 4, "float32"),), 8)
    pages = RankedPages.of(Arena(layout, 201, torch.device("cpu")))
    hand_over = DraftHandOver(drafter, KVCacheManager(layout, 200, max_chunk_tokens=32), pages, lambda _: None)

    def broken(_: str) -> None:
        raise MemoryError("of the drafter")

    monkeypatch.setattr(drafter, "give", broken)
    lend = hand_over.lending("r", "lease")
    lending = hand_over.lent("r")
    assert lending is not None
    with pytest.raises(MemoryError) if is_running else nullcontext():
        lend(is_running)
    assert lending.result(0) is None
