"""Explains a plan as text: demand, the replicas it needs, and objectives that cannot be met. Decides nothing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.planning.capacity import OfferedLoad
from tandem.planning.observation import Outlook
from tandem.planning.pools import Prospect


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Facts from which a plan is explained. Pairs are (prefill, decode) replicas.

    Args:
        had: requested before.
        wanted: needed by the objectives.
        given: what the budget allows of that.
        load: demand of the last minute.
        prospect: demand and capacity planned for, `horizon_s` ahead.
        before, after: predictions at that demand with `had` and `given`.
    """

    had: tuple[int, int]
    wanted: tuple[int, int]
    given: tuple[int, int]
    load: OfferedLoad
    prospect: Prospect
    horizon_s: float
    before: Outlook
    after: Outlook


def explain(change: Change) -> str:
    """Returns one sentence on demand and one per pool."""
    settings, coming = change.prospect.settings, change.prospect.load
    demand = (
        f"{change.load.requests_per_s:.1f} requests/s now, up to {coming.requests_per_s:.1f} within "
        f"{change.horizon_s:.0f} s ({coming.num_missing_tokens:.0f} prompt tokens to compute and "
        f"{coming.num_output_tokens:.0f} to generate each)"
    )
    prefill = (
        f"prefill {_step(change.had[0], change.given[0])}: {change.prospect.offered:.1f} workers' work"
        f"{_backlog(change.prospect.backlog_ms)}; TTFT {_ms(change.before.ttft_ms)} "
        f"{_becomes(change, 0, change.after.ttft_ms)}of {settings.ttft_ms:.0f} ms"
    )
    decode = (
        f"decode {_step(change.had[1], change.given[1])}: KV and slots {_percent(change.after.decode_use)} used; "
        f"TPOT {_ms(change.before.tpot_ms)} {_becomes(change, 1, change.after.tpot_ms)}of {settings.tpot_ms:.0f} ms"
    )
    return f"{demand}. {prefill}. {decode}."


def warn(change: Change) -> Sequence[str]:
    """Returns messages on objectives that cannot be met, with reasons."""
    found = []
    settings, prospect, after = change.prospect.settings, change.prospect, change.after
    if change.given != change.wanted:
        found.append(
            f"the objectives need {change.wanted[0]} prefill and {change.wanted[1]} decode replicas, "
            f"{settings.accelerators(*change.wanted)} accelerators, and {settings.max_accelerators} are allowed"
        )
    if prospect.own_ms > settings.ttft_ms:
        found.append(
            f"a long prompt (the {settings.share:.0%} quantile) takes {_ms(prospect.own_ms)} by itself, more than the "
            f"{settings.ttft_ms:.0f} ms allowed; no number of prefill workers changes that"
        )
    if prospect.alone_ms > settings.tpot_ms:
        found.append("a decode step of one request alone takes longer than the TPOT objective")
    if not after.meets_slo and (change.given != change.wanted or _at_most(change) or not found):
        found.append(f"predicted: TTFT {_ms(after.ttft_ms)}, TPOT {_ms(after.tpot_ms)}; the objectives are not met")
    return tuple(found)


def _at_most(change: Change) -> bool:
    settings = change.prospect.settings
    return change.given[0] == settings.max_prefill or change.given[1] == settings.max_decode


def _step(old: int, new: int) -> str:
    return f"stays {new}" if old == new else f"{old} to {new}"


def _becomes(change: Change, pool: int, then_ms: float) -> str:
    return "" if change.had[pool] == change.given[pool] else f"becomes {_ms(then_ms)} "


def _backlog(backlog_ms: float) -> str:
    return f" and {backlog_ms / 1000:.0f} s of backlog" if backlog_ms >= 1000 else ""


def _ms(value: float) -> str:
    return "without end" if math.isinf(value) else f"{value:.0f} ms"


def _percent(value: float) -> str:
    return "over 100 %" if value > 10 else f"{100 * value:.0f} %"
