"""Moves drafters' states of requests between workers: decides whether one is wanted, lends and fetches it. A drafter
guesses tokens; its state lets it go on where the other worker's stopped.

Invariant: the drafter gets bytes only after they arrived, the sampled checksums agree and the source has confirmed the
lease. Without them the drafter starts without state, so no failure here fails the request.
"""

import asyncio
import logging

from tandem.compute.ranked_pages import OPAQUE
from tandem.core.errors import TandemError
from tandem.core.machine import wall_s
from tandem.core.sampling_params import SamplingParams
from tandem.core.speculate import OFF
from tandem.core.timeline import Stage
from tandem.engine.drafts.hand_over import LentDraftState
from tandem.rpc.messages import PrefillCall
from tandem.rpc.prefill_messages import LeasedDraftState
from tandem.worker.confirm import confirm, succeeded
from tandem.worker.core import WorkerCore
from tandem.worker.source import KVSource
from tandem.worker.transfer_hold import TransferHold

_FETCH_S = 1.0  # NOTE: the request waits for it

logger = logging.getLogger(__name__)


def drafter_of(core: WorkerCore, params: SamplingParams) -> str:
    """Fingerprint of this worker's drafter, for which another worker's state could be used; "" = none could be."""
    return "" if core.draft_states is None or params.speculate == OFF else core.draft_states.fingerprint


def is_wanted(core: WorkerCore, call: PrefillCall) -> bool:
    """Whether the reader of a prompt's KV wants the drafter's state, and has an equal drafter."""
    return core.draft_states is not None and call.drafter == core.draft_states.fingerprint


async def lent_draft_state(core: WorkerCore, engine_id: str, lease_id: str) -> LeasedDraftState | None:
    """The drafter's state of a request that has ended, added to its lease; None = there is none."""
    lending = None if core.draft_states is None else core.draft_states.lent(engine_id)
    lent = None if lending is None else await asyncio.wrap_future(lending)
    if lent is None:
        return None
    core.leases.grant_pages(lease_id, lent.page_ids)
    return LeasedDraftState(lent.first, lent.num_rows, lent.num_bytes, lent.page_ids)


async def fetch_draft_state(
    core: WorkerCore, source: KVSource, lease_id: str, leased: LeasedDraftState, engine_id: str
) -> Stage | None:
    """Reads a leased drafter's state and has the drafter begin request `engine_id` with it; returns the stage for the
    timeline. None: it could not be read in time. `forget_draft_state` must follow.
    """
    # NOTE: named for the lease too: an earlier read for this request may still write, into pages of another hold
    hold = TransferHold(core.engine, f"draft state of {engine_id} under {lease_id}")
    try:
        async with asyncio.timeout(_FETCH_S):
            return await _fetch(core, source, lease_id, leased, engine_id, hold)
    except (TandemError, TimeoutError) as error:
        why = error if isinstance(error, TandemError) else f"it was not there within {_FETCH_S:g} s"
        logger.info("request %s is drafted for without its prompt: %s", engine_id, why)
        return None
    finally:
        hold.close()


def forget_draft_state(core: WorkerCore, engine_id: str) -> None:
    """Drops unused states of a request, lent or fetched. Call it when the request is over."""
    states = core.draft_states
    if states is not None:
        core.engine.post(lambda _: states.forget(engine_id))


async def _fetch(
    core: WorkerCore, source: KVSource, lease_id: str, leased: LeasedDraftState, engine_id: str, hold: TransferHold
) -> Stage | None:
    started_s, began_s = wall_s(), core.clock.now_s()
    states, num_pages = core.draft_states, len(leased.page_ids)
    if states is None or not 0 < leased.num_bytes <= num_pages * core.block_bytes:
        return None
    page_ids = tuple(await core.engine.call(lambda engine: engine.kv.borrow(hold.name, num_pages)))
    if len(page_ids) < num_pages:
        return None
    transfer = source.read_pages(leased.page_ids, page_ids)
    hold.add(transfer)
    await succeeded(transfer)
    remote, local = [(page,) for page in leased.page_ids], [(page,) for page in page_ids]
    await confirm(core, source, lease_id, [OPAQUE] * num_pages, remote, local)
    lent = LentDraftState(leased.first, leased.num_rows, leased.num_bytes, page_ids)
    await core.engine.call(lambda _: states.take(engine_id, lent))
    attributes: dict[str, str | int | float] = {
        "source": source.worker.worker_id,
        "num_bytes": leased.num_bytes,
        "num_rows": leased.num_rows,
    }
    return Stage("draft state", core.me.worker_id, started_s, core.clock.now_s() - began_s, attributes)
