"""`tandem usage`: exports the usage that gateways have billed as CSV or JSON, request by request or as totals."""

import asyncio
import sys

from pydantic import Field, SecretStr

from tandem.accounts.export import Format
from tandem.accounts.ledger_query import MAX_ENTRIES, LedgerQuery
from tandem.accounts.open import open_store
from tandem.accounts.rows import usage_text
from tandem.core.clock import SystemClock
from tandem.process.settings import Settings


class UsageCommand(Settings, cli_prog_name="tandem usage"):
    """Export the usage and cost of keys: each request, or totals with --by. Amounts are exact."""

    accounts: SecretStr = Field(description="the ledger, as the gateway's --accounts: redis:// URL or a file")
    by: str | None = Field(None, description="day,key_id,tenant,model: totals of these; omitted: each request")
    since: str | None = Field(None, description="first day, as 2026-11-21, UTC; omitted: the ledger's first")
    until: str | None = Field(None, description="last day; omitted: today")
    key_id: str | None = Field(None, description="only usage of this key; omitted: of all")
    tenant: str | None = Field(None, description="only usage of this tenant; omitted: of all")
    limit: int = Field(
        MAX_ENTRIES, ge=1, le=MAX_ENTRIES, description="maximum number of requests; the latest are shown"
    )
    format: Format = Field(Format.CSV, description="output format, csv or json")

    def run(self) -> int:
        """Print it; returns the exit code."""
        query = LedgerQuery(self.since, self.until, self.key_id, self.tenant, self.limit)
        sys.stdout.write(asyncio.run(self._text(query)))
        return 0

    async def _text(self, query: LedgerQuery) -> str:
        store = open_store(self.accounts.get_secret_value(), SystemClock(), must_exist=True)
        try:
            return (await usage_text(store, self.by, query, self.format)).decode()
        finally:
            await store.close()
