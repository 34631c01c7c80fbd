"""`tandem keys create|list|show|revoke`: manages API keys in the store that gateways use.

A secret is printed only once. Accesses the store directly, so it works whether or not a gateway runs.
"""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import Field, SecretStr
from pydantic_settings import CliPositionalArg
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem.accounts.key import AccountKey, KeyLimits, key_id_of, new_key
from tandem.accounts.money import parse_nanos
from tandem.accounts.open import open_store
from tandem.accounts.rows import key_row
from tandem.accounts.store import AccountStore
from tandem.core.clock import SystemClock
from tandem.core.errors import InvalidRequestError, shown
from tandem.process.settings import Settings

_FILE_COLUMNS = 200
_WHICH = "id shown by `tandem keys list`, or the key's secret"
_WHERE = "where the keys are, as the gateway's --accounts: redis:// URL or a file"


class _OnStore(Settings):
    """Common flags of commands that need the store."""

    accounts: SecretStr = Field(description=_WHERE)

    def _with_store(self, work: Callable[[AccountStore], Awaitable[int]], *, must_exist: bool = True) -> int:
        async def run() -> int:
            store = open_store(self.accounts.get_secret_value(), SystemClock(), must_exist=must_exist)
            try:
                return await work(store)
            finally:
                await store.close()

        return asyncio.run(run())


class CreateKey(_OnStore, cli_prog_name="tandem keys create"):
    """Create an API key and print its secret, which is not stored and shown only once. Omitted limits do not apply."""

    name: str = Field(description="name for people")
    tenant: str | None = Field(
        None, description="tenant, whose keys share caches, history and stored answers; omitted: one of its own"
    )
    requests_per_minute: int | None = Field(None, description="maximum requests a minute; omitted: no limit")
    input_tokens_per_minute: int | None = Field(
        None, description="maximum prompt tokens a minute, without cached ones; omitted: no limit"
    )
    output_tokens_per_minute: int | None = Field(
        None, description="maximum generated tokens a minute; omitted: no limit"
    )
    concurrency: int | None = Field(None, description="maximum requests at once; omitted: no limit")
    budget: str | None = Field(
        None, description="maximum cost of all its requests, in units of the prices; omitted: no limit"
    )
    models: str | None = Field(None, description="models that it may use, as a,b; omitted: all")
    share_cache_with: str | None = Field(
        None, description="name of a group of keys that share their caches; omitted: none"
    )
    admin: bool = Field(False, description="it may manage keys and see the usage of every tenant")

    def run(self) -> int:
        """Prints the secret to standard output, and a description to the terminal."""
        key, secret = self._new_key()

        async def add(store: AccountStore) -> int:
            await store.add_key(key)
            return 0

        self._with_store(add, must_exist=False)
        Console(stderr=True, highlight=False).print(
            f"key {key.key_id} of tenant {key.tenant}; its secret is shown only now:", markup=False
        )
        sys.stdout.write(f"{secret}\n")
        return 0

    def _new_key(self) -> tuple[AccountKey, str]:
        limits = KeyLimits(
            requests_per_minute=self.requests_per_minute,
            input_tokens_per_minute=self.input_tokens_per_minute,
            output_tokens_per_minute=self.output_tokens_per_minute,
            concurrency=self.concurrency,
            budget_nanos=None if self.budget is None else parse_nanos(self.budget),
        )
        return new_key(
            self.name,
            int(time.time()),
            self.tenant,
            limits=limits,
            models=tuple(name.strip() for name in self.models.split(",")) if self.models else (),
            cache_group=self.share_cache_with,
            is_admin=self.admin,
        )


class ListKeys(_OnStore, cli_prog_name="tandem keys list"):
    """List all keys, including revoked ones, with their spending."""

    as_json: bool = Field(False, description="print JSON instead of a table")

    def run(self) -> int:
        async def show(store: AccountStore) -> int:
            rows = [await key_row(key, store) for key in await store.all_keys()]
            if self.as_json:
                sys.stdout.write(json.dumps(rows, indent=1) + "\n")
            else:
                width = None if sys.stdout.isatty() else _FILE_COLUMNS
                Console(highlight=False, width=width).print(_table(rows))
            return 0

        return self._with_store(show)


class ShowKey(_OnStore, cli_prog_name="tandem keys show"):
    """Show one key as JSON: its limits and its spending."""

    key_id: CliPositionalArg[str] = Field(description=_WHICH)

    def run(self) -> int:
        async def show(store: AccountStore) -> int:
            key_id = _id_in(self.key_id)
            key = (await store.find_keys([key_id])).get(key_id)
            if key is None:
                raise _unknown(key_id)
            sys.stdout.write(json.dumps(await key_row(key, store), indent=1) + "\n")
            return 0

        return self._with_store(show)


class RevokeKey(_OnStore, cli_prog_name="tandem keys revoke"):
    """Revoke a key at every gateway.

    With accounts in Redis, generating requests are refused at once, all others within two seconds; in a file, within
    two seconds.
    """

    key_id: CliPositionalArg[str] = Field(description=_WHICH)

    def run(self) -> int:
        async def revoke(store: AccountStore) -> int:
            key_id = _id_in(self.key_id)
            if not await store.revoke_key(key_id, int(time.time())):
                raise _unknown(key_id)
            return 0

        return self._with_store(revoke)


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("key", "name", "tenant", "spent", "budget", "limits", "state"):
        table.add_column(name, justify="right" if name in ("spent", "budget") else "left", overflow="fold")
    for row in rows:
        limits = ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in row["limits"].items() if value)
        state = "revoked" if row["revoked_s"] is not None else "admin" if row["is_admin"] else "live"
        cells = (row["key_id"], row["name"], row["tenant"], row["spent"], row["budget"] or "-", limits or "-", state)
        table.add_row(*map(Text, cells))
    return table


def _id_in(given: str) -> str:
    """The id in a secret, so that errors do not show secrets; anything else is an id itself."""
    return key_id_of(given) or given


def _unknown(key_id: str) -> InvalidRequestError:
    return InvalidRequestError(f"there is no key {shown(key_id)}; `tandem keys list` shows all")
