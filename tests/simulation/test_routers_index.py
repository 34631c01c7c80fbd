"""Routers' own indexes of blocks, to which workers report by calls that do not arrive, or whose answers do not.

Scenarios written by hand: an index that is wrong makes prompts slower and no answer wrong, so no seed fails by it.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from tandem.core.events import BlockEvent
from tandem.locality.base import LocalityIndex, PublishResult
from tandem.locality.feed import BlockFeed
from tandem.router.prefix_lookup import PrefixLookup
from tandem.simulation.fault import Fault, FaultKind
from tandem.simulation.run import run_scenario
from tests.simulation.mutations import no_snapshot_for_a_new_router
from tests.simulation.test_lost_workers import BEGIN_S, SCENARIO

Reported = tuple[list[BlockFeed], LocalityIndex]
DIES = Fault(FaultKind.CRASH, BEGIN_S + 0.5, 1.0, "router-0")
FAULTS = (
    Fault(FaultKind.CUT, BEGIN_S, 3.0, "prefill-0", "router-0"),
    Fault(FaultKind.CUT_ONE_WAY, BEGIN_S, 3.0, "router-0", "prefill-0"),
    DIES,
)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silences the processes' logs of the faults injected into them."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def reported(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> Reported:
    """The feeds of all workers, and the index of the router that has them at the end."""
    feeds, indexes = list[BlockFeed](), list[LocalityIndex]()
    make, publish = BlockFeed.__init__, PrefixLookup.publish

    def made(self: BlockFeed, index: LocalityIndex, worker_id: str, epoch: int) -> None:
        make(self, index, worker_id, epoch)
        feeds.append(self)

    async def published(
        self: PrefixLookup, worker_id: str, epoch: int, events: Sequence[BlockEvent], sequence: int
    ) -> PublishResult:
        indexes.append(self._index)
        return await publish(self, worker_id, epoch, events, sequence)

    monkeypatch.setattr(BlockFeed, "__init__", made)
    monkeypatch.setattr(PrefixLookup, "publish", published)
    report = run_scenario(replace(SCENARIO, faults=(fault,)))
    assert not report.violations
    assert [outcome.ending for outcome in report.outcomes] == ["whole"] * len(SCENARIO.asks)
    return feeds, indexes[-1]


def unknown_blocks(found: Reported) -> int:
    """Number of the workers' blocks that the index does not know."""
    feeds, index = found
    held = [(feed._worker_id, block) for feed in feeds for block in feed._held]
    assert held
    return sum(worker_id not in index.leading_blocks([block]) for worker_id, block in held)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.kind.value)
def test_a_router_knows_all_blocks_once_reports_arrive_again(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    found = reported(fault, monkeypatch)
    assert unknown_blocks(found) == 0
    assert found[1].stats().num_block_replicas == sum(len(feed._held) for feed in found[0]), "and no others"


def test_a_router_that_began_anew_and_is_not_told_all_does_not_know_them(monkeypatch: pytest.MonkeyPatch) -> None:
    no_snapshot_for_a_new_router(monkeypatch)
    assert unknown_blocks(reported(DIES, monkeypatch)) > 0
