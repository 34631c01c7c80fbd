"""HTTP routes `/admin/keys` and `/admin/usage` for admin keys: the same functions as `tandem keys` and `tandem usage`.

A secret is shown only in the answer that creates the key.
"""

import time
from typing import Annotated

from fastapi import FastAPI, Query
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from tandem.accounts.accounts import Accounts
from tandem.accounts.export import Format
from tandem.accounts.key import AccountKey, KeyLimits, new_key
from tandem.accounts.ledger_query import MAX_ENTRIES, LedgerQuery
from tandem.accounts.money import parse_nanos
from tandem.accounts.rows import key_row, usage_text
from tandem.accounts.store import AccountStore
from tandem.core.errors import shown
from tandem.gateway.errors import RequestError

_TYPES = {Format.CSV: "text/csv; charset=utf-8", Format.JSON: "application/json"}
_NO_STORE = {"cache-control": "no-store"}


class NewKeyBody(BaseModel):
    """Permissions and limits of a new key. Omitted: no limit."""

    model_config = ConfigDict(extra="forbid")
    name: str
    tenant: str | None = Field(None, description="whose caches and history it shares; omitted: its own")
    requests_per_minute: int | None = Field(None, description="omitted: no limit")
    input_tokens_per_minute: int | None = Field(
        None, description="prompt tokens that are not read from the cache; omitted: no limit"
    )
    output_tokens_per_minute: int | None = Field(None, description="omitted: no limit")
    concurrency: int | None = Field(None, description="requests at once; omitted: no limit")
    budget: str | None = Field(
        None, description="what all its requests may cost, in units of --prices, as a decimal; omitted: no limit"
    )
    models: list[str] = Field([], description="models it may use; empty: all")
    share_cache_with: str | None = Field(
        None, description="keys of this group read each other's caches; omitted: those of its tenant only"
    )
    admin: bool = Field(False, description="it may manage keys and see the usage of every tenant")


def add_account_routes(app: FastAPI, accounts: Accounts) -> None:
    """Adds the routes to a gateway's app."""
    _add_keys(app, accounts)
    _add_usage(app, accounts.store)


def _add_keys(app: FastAPI, accounts: Accounts) -> None:
    store = accounts.store

    @app.post("/admin/keys", tags=["accounts"], status_code=201)
    async def create_key(body: NewKeyBody) -> Response:
        """Creates a key; its secret is shown only in this answer."""
        key, secret = _key_of(body)
        await store.add_key(key)
        return JSONResponse({**await key_row(key, store), "secret": secret}, 201, _NO_STORE)

    @app.get("/admin/keys", tags=["accounts"])
    async def list_keys() -> Response:
        """All keys, including revoked ones, with their spending."""
        return JSONResponse({"keys": [await key_row(key, store) for key in await store.all_keys()]})

    @app.get("/admin/keys/{key_id}", tags=["accounts"])
    async def show_key(key_id: str) -> Response:
        """One key with its limits and spending."""
        key = (await store.find_keys([key_id])).get(key_id)
        if key is None:
            raise _unknown(key_id)
        return JSONResponse(await key_row(key, store))

    @app.delete("/admin/keys/{key_id}", tags=["accounts"])
    async def revoke_key(key_id: str) -> Response:
        """Revokes a key: refused at once by this gateway, within two seconds by the others."""
        if not await store.revoke_key(key_id, int(time.time())):
            raise _unknown(key_id)
        await accounts.refresh()
        return JSONResponse({"key_id": key_id, "revoked": True})


def _add_usage(app: FastAPI, store: AccountStore) -> None:
    @app.get("/admin/usage", tags=["accounts"])
    async def usage(
        form: Annotated[Format, Query(alias="format")] = Format.JSON,
        by: Annotated[
            str | None, Query(description="day,key_id,tenant,model: totals of these; omitted: requests")
        ] = None,
        since: Annotated[str | None, Query(description="day, as 2026-11-21, UTC")] = None,
        until: Annotated[str | None, Query(description="day, included")] = None,
        key_id: str | None = None,
        tenant: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MAX_ENTRIES)] = 10_000,
    ) -> Response:
        """Usage: single requests, or totals."""
        text = await usage_text(store, by, LedgerQuery(since, until, key_id, tenant, limit), form)
        return Response(text, media_type=_TYPES[form])


def _key_of(body: NewKeyBody) -> tuple[AccountKey, str]:
    limits = KeyLimits(
        requests_per_minute=body.requests_per_minute,
        input_tokens_per_minute=body.input_tokens_per_minute,
        output_tokens_per_minute=body.output_tokens_per_minute,
        concurrency=body.concurrency,
        budget_nanos=None if body.budget is None else parse_nanos(body.budget),
    )
    return new_key(
        body.name,
        int(time.time()),
        body.tenant,
        limits=limits,
        models=tuple(body.models),
        cache_group=body.share_cache_with,
        is_admin=body.admin,
    )


def _unknown(key_id: str) -> RequestError:
    return RequestError(f"there is no key {shown(key_id)}", param="key_id", code="not_found", status=404)
