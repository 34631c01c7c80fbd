"""Formats keys and usage for operators, on the command line and over HTTP. Amounts are exact."""

import asyncio
from typing import Any

from tandem.accounts.export import GROUPS, Format, entry_rows, format_rows, total_rows
from tandem.accounts.key import AccountKey
from tandem.accounts.ledger_query import LedgerQuery
from tandem.accounts.money import format_nanos
from tandem.accounts.store import AccountStore
from tandem.core.errors import InvalidRequestError, shown


async def usage_text(store: AccountStore, by: str | None, query: LedgerQuery, form: Format) -> bytes:
    """Usage as text: each request, or totals by the named groups. NOTE: formatted in a thread, as it can take
    seconds.

    Raises:
        InvalidRequestError: a group is not one of `GROUPS`.
    """
    if by is None:
        entries = await store.entries(query)
        return await asyncio.to_thread(lambda: format_rows(entry_rows(entries), form).encode())
    groups = tuple(name.strip() for name in by.split(","))
    if not set(groups) <= set(GROUPS):
        raise InvalidRequestError(f"by={shown(by)} must be some of {', '.join(GROUPS)}")
    totals = await store.totals(query.since_day, query.until_day)
    wanted = (total for total in totals if query.matches_total(total))
    return await asyncio.to_thread(lambda: format_rows(total_rows(wanted, groups), form).encode())


async def key_row(key: AccountKey, store: AccountStore) -> dict[str, Any]:
    """A key and its spending as JSON values; amounts as decimals."""
    value = key.as_json()
    budget = value["limits"].pop("budget_nanos")
    spending = await store.spending(key.key_id)
    return {
        **value,
        "budget": None if budget is None else format_nanos(budget),
        "spent": format_nanos(spending.spent_nanos),
        "held": format_nanos(spending.held_nanos),
        "num_running": spending.num_open,
    }
