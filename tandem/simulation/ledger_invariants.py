"""Checks the accounts at a run's end: spending equals the ledger, nothing stays reserved, each request is billed once.

A request costs what its client received. If its gateway died before the settlement, it costs the last checkpoint that
the store accepted, which is no more than was delivered and no older than a renewal. Changes nothing except that leases
expire.
"""

from collections.abc import Sequence

from tandem.accounts.accounts import RENEWALS_PER_LEASE
from tandem.accounts.charge import ChargeOutcome, LedgerEntry
from tandem.accounts.prices import Prices
from tandem.simulation.client import ClientOutcome
from tandem.simulation.redis_accounts import ledger_of, spending_of_keys
from tandem.simulation.world import World

_CALLS_OF_ROUND = 3  # of the store, for each renewal
_KEPT_S = 2.0  # in which the store has answered or the journal was written
_WORK_S = 0.02  # more than both ends of a call take


def check_ledger(world: World) -> None:
    """Records every violation in the world."""
    entries = _checked_balances(world)
    by_request: dict[str, list[LedgerEntry]] = {}
    for entry in entries:
        by_request.setdefault(entry.request_id, []).append(entry)
    for exchange in world.exchanges:
        outcome = exchange.outcome
        charged = by_request.pop(outcome.ask.request_id, [])
        if not world.scenario.is_open:
            _check_entries(world, outcome, charged)
    for request_id in by_request:
        world.violate(f"{request_id} was charged and never asked")


def _checked_balances(world: World) -> Sequence[LedgerEntry]:
    """Checks every key's balance; returns the ledger after all that was not renewed has expired."""
    spendings = spending_of_keys(world.redis)
    entries = ledger_of(world.redis)
    for key_id, spending in spendings.items():
        spent = sum(entry.cost_nanos for entry in entries if entry.key_id == key_id)
        if spending.spent_nanos != spent:
            world.violate(f"key {key_id} has spent {spending.spent_nanos}, its ledger says {spent}")
        if spending.num_open or spending.held_nanos:
            world.violate(
                f"key {key_id} has {spending.num_open} requests, {spending.held_nanos} nanos set aside for ever"
            )
    for entry in entries:
        if entry.cost_nanos != Prices().cost_nanos(entry.usage):
            world.violate(f"{entry.request_id} costs {entry.cost_nanos}, which is not what its usage costs")
    return entries


def _check_entries(world: World, outcome: ClientOutcome, entries: Sequence[LedgerEntry]) -> None:
    name, num_tokens = outcome.ask.request_id, len(outcome.tokens)
    charged = [entry.usage.num_output for entry in entries]
    if len(entries) > 1:
        world.violate(f"{name} was charged {len(entries)} times: {charged}")
    died_at_s = _died_at_s(world, outcome)
    if died_at_s is None:
        if any(entry.outcome == ChargeOutcome.EXPIRED for entry in entries):
            world.violate(f"{name} is billed at a checkpoint although its gateway lives")
        if outcome.is_whole and charged != [num_tokens]:
            world.violate(f"{name} got {num_tokens} tokens and was charged {charged}")
    elif outcome.is_whole and _is_kept(world, outcome, died_at_s) and charged != [num_tokens]:
        world.violate(f"{name} got {num_tokens} tokens, its gateway died with its journal, and was charged {charged}")
    elif outcome.is_lost:
        if sum(charged) > num_tokens:
            world.violate(f"{name} got {num_tokens} tokens of a gateway that died and was charged {charged}")
        if sum(charged) < (least := _num_checkpointed(world, outcome, died_at_s)):
            world.violate(f"{name} got {least} tokens a renewal before its gateway died and was charged {charged}")


def _died_at_s(world: World, outcome: ClientOutcome) -> float | None:
    """Time at which the gateway of a request died, if that was before its settlement was certainly stored."""
    ended_s = outcome.ended_s or 0.0
    return next((at_s for at_s in world.crashed.get(outcome.ask.gateway, ()) if at_s >= ended_s), None)


def _is_kept(world: World, outcome: ClientOutcome, died_at_s: float) -> bool:
    """Whether the settlement is in the store or in the journal of the gateway that died."""
    gateway, ended_s = outcome.ask.gateway, outcome.ended_s or 0.0
    was_away = any(span.name == gateway and span.from_s < died_at_s for span in world.spans)
    was_lost = world.redis.num_failovers > 0 or world.disks[gateway].was_ever_full or was_away
    return not was_lost and died_at_s - ended_s > _KEPT_S


def _num_checkpointed(world: World, outcome: ClientOutcome, died_at_s: float) -> int:
    """Tokens that a checkpoint must cover: those streamed before the last renewal that certainly arrived."""
    scenario = world.scenario
    round_s = _CALLS_OF_ROUND * 2 * (scenario.conditions.slow_s + _WORK_S)
    since_s = died_at_s - scenario.account_lease_s / RENEWALS_PER_LEASE - round_s
    is_sure = outcome.ask.is_stream and world.was_well(outcome.ask.gateway, since_s, died_at_s)
    if not is_sure or world.redis.num_failovers:
        return 0
    return sum(at_s <= since_s for at_s in outcome.token_times)
