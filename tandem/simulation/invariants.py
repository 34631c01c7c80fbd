"""Invariants that must hold at the end of every run, whatever faults it had. Read-only.

Tokens equal the model's, or there is a clear error; no blocks stay held after leases have ended; no request fails while
a worker could have served it. Invariants of accounts are in `ledger_invariants`.
"""

from tandem.gateway.accounts_headers import ACCOUNTS_AWAY
from tandem.gateway.settings import GatewaySettings
from tandem.process.fleet_watch import MAX_BACKOFF_S
from tandem.ranks.group import EXCHANGE_DEADLINE_S
from tandem.router.settings import RouterSettings
from tandem.simulation.client import ClientOutcome
from tandem.simulation.fault import NOTICED_RANK_FAULTS, RANK_FAULTS
from tandem.simulation.ledger_invariants import check_ledger
from tandem.simulation.world import EPSILON_S, World
from tandem.worker.lifecycle import LifecycleState

MAX_GAP_S = 9.5  # between two tokens of a stream that some worker could continue
RANKS_GAP_S = 5.0  # where nothing is wrong but a group of ranks, and another worker has none
ABLE_S = 9.0  # a worker and a router that were there for so long must have been found
_GATEWAY, _ROUTER = GatewaySettings.model_fields, RouterSettings.model_fields
GRACE_S: float = _GATEWAY["failover_timeout_s"].default  # gateways wait for a worker for so long
# Time until a worker and a router that are well again are found by a gateway that waits for them. A router's stream
# from the worker ends by silence and is opened anew, then the gateway probes the worker.
FOUND_S: float = _ROUTER["dead_after_s"].default + MAX_BACKOFF_S + _GATEWAY["worker_timeout_s"].default
_GIVEN_UP = (429, 503)  # statuses of requests that were refused for lack of workers
_NO_WORKER = "unavailable"  # code of requests that no worker and router served in time


def check_end(world: World) -> None:
    """Record every violation at the end of a run."""
    for exchange in world.exchanges:
        _check_outcome(world, exchange.outcome)
    _check_rest(world)
    check_ledger(world)


def _check_outcome(world: World, outcome: ClientOutcome) -> None:
    name = outcome.ask.request_id
    if outcome.ended_s is None:
        world.violate(f"{name} waits for ever")
        return
    _check_gap(world, outcome)
    check_tokens(world, outcome)
    if outcome.is_whole:
        return
    if outcome.error is not None:
        if outcome.status not in (200, *_GIVEN_UP):
            world.violate(f"{name} failed with {outcome.status}: {outcome.error}")
        elif (able := _able_while_failing(world, outcome, outcome.ended_s)) is not None:
            world.violate(f"{name} failed although {able} could have served it: {outcome.status} {outcome.error}")
    elif not (outcome.has_left or outcome.is_lost):
        world.violate(f"{name} ended with {outcome.status} and no word why")


def check_tokens(world: World, outcome: ClientOutcome) -> None:
    """Record where an answer differs from the model's; an unfinished answer is compared as far as it has come."""
    ask, name = outcome.ask, outcome.ask.request_id
    for index, (got, wanted) in enumerate(zip(outcome.choices, ask.answers, strict=True)):
        if got != wanted[: len(got)]:
            world.violate(f"{name} got {got}, should have got {wanted}")
        elif got != wanted and (reason := outcome.finish_reasons.get(index)) is not None:
            world.violate(f"{name} ended after {len(got)} of {len(wanted)} tokens: {reason}")


def _check_gap(world: World, outcome: ClientOutcome) -> None:
    """Check that a stream does not stall for long while some worker could continue it."""
    since_s, until_s = outcome.longest_gap
    lasts_s = MAX_GAP_S if not _was_late(world, since_s, until_s) else EXCHANGE_DEADLINE_S + EPSILON_S
    if until_s - since_s > lasts_s and (able := _able_pair(world, outcome, until_s)) is not None:
        world.violate(f"{outcome.ask.request_id} stood still for {until_s - since_s:.1f} s beside {able}")
    elif until_s - since_s > RANKS_GAP_S and _lost_ranks_only(world, since_s - ABLE_S, until_s):
        able = _able_pair(world, outcome, until_s)
        if able is not None and _able_pair(world, outcome, since_s) == able:
            world.violate(
                f"{outcome.ask.request_id} went on {until_s - since_s:.1f} s after ranks were lost, beside {able}"
            )


def _was_late(world: World, since_s: float, until_s: float) -> bool:
    """Whether ranks were slow or cut off from each other, which is noticed only at the deadline of an exchange."""
    late = [span for span in world.spans if span.kind in RANK_FAULTS - NOTICED_RANK_FAULTS]
    return any(span.from_s < until_s and (span.until_s or until_s) > since_s for span in late)


def _lost_ranks_only(world: World, since_s: float, until_s: float) -> bool:
    """Whether the only faults were killed or paused ranks, which are noticed within two seconds."""
    spans = [span for span in world.spans if span.from_s < until_s and (span.until_s or until_s) > since_s]
    return bool(spans) and all(span.kind in NOTICED_RANK_FAULTS for span in spans)


def _able_while_failing(world: World, outcome: ClientOutcome, failed_s: float) -> str | None:
    """Returns a decode worker and a router that could have served a request that failed, or None.

    A request for which there was none waits for the grace. It lost its worker after its last token, so the grace did
    not end before `lost_s + GRACE_S`, although a gateway may have given up earlier.
    """
    if outcome.error_code != _NO_WORKER or outcome.error == ACCOUNTS_AWAY:
        return _able_pair(world, outcome, failed_s)
    if _has_used_attempts(world, outcome, failed_s):
        return _able_pair(world, outcome, failed_s, FOUND_S)
    lost_s = outcome.began_s if outcome.heard_s is None else outcome.heard_s
    since_s, until_s = max(lost_s, failed_s - GRACE_S), max(failed_s, lost_s + GRACE_S)
    starts = {since_s, *(span.until_s for span in world.spans if span.until_s is not None and span.until_s > since_s)}
    for start_s in sorted(start_s for start_s in starts if start_s + FOUND_S <= until_s):
        able = _able_pair(world, outcome, start_s + FOUND_S, FOUND_S)
        if able is not None:
            return f"{able}, well since {start_s:.1f} s,"
    return None


def _has_used_attempts(world: World, outcome: ClientOutcome, failed_s: float) -> bool:
    """Whether a request has lost as many workers as may be tried for one, since a request may be what ends them. True
    if its gateway has crashed since, which alone knew.
    """
    gateway = world.gateways.get(outcome.ask.gateway)
    if gateway is None or any(at_s > failed_s for at_s in world.crashed.get(outcome.ask.gateway, ())):
        return True
    record = gateway.gateway.history.find(outcome.ask.request_id)
    ends = () if record is None else record.ends.values()
    return any(end.num_failovers >= _GATEWAY["max_attempts"].default for end in ends)


def _able_pair(world: World, outcome: ClientOutcome, until_s: float, for_s: float = ABLE_S) -> str | None:
    """Returns the names of a decode worker and a router without faults during the `for_s` until then, or None."""
    since_s = until_s - for_s
    if since_s < 0 or not world.was_well(outcome.ask.gateway, since_s, until_s):
        return None
    routers = [name for name in world.scenario.routers if world.was_well(name, since_s, until_s)]
    decodes = [name for name in world.scenario.decodes if world.was_well(name, since_s, until_s)]
    return f"{decodes[0]} and {routers[0]}" if routers and decodes else None


def _check_rest(world: World) -> None:
    """Check the state at rest, when no requests are left and every lease has expired."""
    for name, simulated in world.workers.items():
        engine, worker = simulated.engine, simulated.worker
        try:
            engine.check()
        except AssertionError as error:
            world.violate(f"{name} has lost count of its blocks: {error}")
        usage, load = engine.kv.usage, engine.load()
        held = {
            "used": usage.used,
            "leased": usage.leased,
            "transferring": usage.transferring,
            "requests": load.num_requests,
        }
        promised = engine.kv.pinned.blocks
        promised.expire(worker.core.clock.now_s())
        held |= {"pinned": promised.usage.num_pinned, "read": len(promised.read_block_ids)}
        held |= {"leases": len(worker.core.leases), "calls": worker.lifecycle.num_working}
        if any(held.values()):
            world.violate(f"{name} still holds {held}")
    _check_ranks(world)


def _check_ranks(world: World) -> None:
    """Check that each ready worker has all its ranks, and that no process of a rank has lost its leader, unless it is
    paused.
    """
    started = {process: system for system in world.rank_systems for process in system.started if not process.has_ended}
    for process, system in started.items():
        is_present = system in world.environment.rank_systems.values() and process in system.ranks.values()
        if not is_present and not process.node.is_paused:
            world.violate(f"the process of {process.node.name} runs although nobody leads it")
    for name, simulated in world.workers.items():
        present = world.environment.rank_systems.get(name)
        is_ready = simulated.worker.lifecycle.state is LifecycleState.READY
        if present is not None and is_ready and any(process.has_ended for process in present.ranks.values()):
            world.violate(f"{name} is ready and lacks a rank")
