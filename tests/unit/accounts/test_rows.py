"""The bill as operators read it is written beside the event loop, which all streams share."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from tandem.accounts import rows
from tandem.accounts.embedded import EmbeddedAccounts
from tandem.accounts.export import Format
from tandem.accounts.ledger_query import LedgerQuery
from tandem.accounts.rows import usage_text
from tandem.core.clock import ManualClock


@pytest.mark.parametrize(("by", "made_by"), [(None, "entry_rows"), ("day", "total_rows")])
def test_rows_and_their_text_are_made_in_a_thread(
    by: str | None, made_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    for name in (made_by, "format_rows"):
        make = getattr(rows, name)

        def noted(*args: Any, make: Any = make) -> Any:
            threads.append(threading.get_ident())
            return make(*args)

        monkeypatch.setattr(rows, name, noted)

    async def run() -> None:
        store = EmbeddedAccounts(tmp_path / "accounts", ManualClock())
        assert await usage_text(store, by, LedgerQuery(), Format.JSON) == b"[]\n"
        await store.close()

    asyncio.run(run())
    assert len(threads) == 2
    assert threading.get_ident() not in threads
