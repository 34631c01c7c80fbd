"""`tandem trace`: shows the stages of one request and their durations, as a table with a bar for each stage.

Reads the timeline that the gateway stores for recent requests.
"""

import asyncio
import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from pydantic import Field, SecretStr
from pydantic_settings import CliPositionalArg
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem.cli.trace_ranks import ranks_of
from tandem.core.errors import InvalidRequestError, UnavailableError, shown, without_password
from tandem.process.probe import get
from tandem.process.settings import Settings

_TIMEOUT_S = 10.0
_BAR_CHARACTERS = 24
_FILE_COLUMNS = 160
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_SUMMARY = {
    "prompt_tokens": "prompt tokens",
    "cached_tokens": "of them cached",
    "output_tokens": "output tokens",
    "num_failovers": "failovers",
}


class TraceCommand(Settings, cli_prog_name="tandem trace"):
    """Show where the time of a recent request went: queue, pairing, prefill, transfers, first token, decode."""

    request_id: CliPositionalArg[str] = Field(description="value of the answer's x-request-id header")
    url: str = Field("http://127.0.0.1:8000", description="address of the gateway that served it")
    api_key: SecretStr | None = Field(
        None, description="API key of the request's tenant, or of an admin; omitted: none"
    )

    def run(self) -> int:
        """Print the table; returns the exit code."""
        request, ranks = asyncio.run(self._fetch())
        console = Console(highlight=False, width=None if sys.stdout.isatty() else _FILE_COLUMNS)
        console.print(_headline(request), markup=False, soft_wrap=True)
        console.print(_table(_stages(request)))
        for line in ranks:
            console.print(line, markup=False, soft_wrap=True)
        return 0

    async def _fetch(self) -> tuple[dict[str, Any], list[str]]:
        """The request's timeline, and lines of text about the ranks of its workers."""
        base = self.url.rstrip("/")
        where = without_password(base)
        try:
            key = None if self.api_key is None else checked_key(self.api_key.get_secret_value())
            answer = await get(f"{base}/admin/requests/{quote(self.request_id, safe='')}", _TIMEOUT_S, key)
        except UnavailableError as error:
            raise UnavailableError(f"no gateway answers at {where} ({error}); name yours with --url") from error
        if answer.status == 404:
            raise InvalidRequestError(
                f"the gateway at {where} does not know request {shown(self.request_id)}: it keeps the latest ones, and "
                "another gateway may have served it; the id is in the answer's x-request-id header"
            )
        if answer.status in (401, 403):
            raise InvalidRequestError(f"the gateway at {where} asks for an API key; give a valid one with --api-key")
        request = _parsed(answer.body)
        if answer.status != 200 or request is None:
            raise UnavailableError(f"{where} answers {answer.status}, not what a gateway of Tandem says; check --url")
        return request, ranks_of(request.get("workers") or [], await _workers(base, key))


async def _workers(base: str, key: str | None) -> bytes:
    """The body of `/admin/workers`; empty where this key may not read it, such as the key of a tenant."""
    try:
        answer = await get(f"{base}/admin/workers", _TIMEOUT_S, key)
    except UnavailableError:
        return b""
    return answer.body if answer.status == 200 else b""


def checked_key(key: str) -> str:
    """Returns `key` if it can be sent in a header.

    Raises:
        InvalidRequestError: it cannot be one.
    """
    if not key.isascii() or not key.isprintable():
        raise InvalidRequestError("the API key may hold printable ASCII only; look for a stray line end")
    return key


def _parsed(body: bytes) -> dict[str, Any] | None:
    try:
        request = json.loads(body)
        is_known = isinstance(request, dict) and all(
            isinstance(stage["name"], str) and 0 <= float(stage["duration_s"]) < math.inf > float(stage["start_s"]) >= 0
            for stage in request["stages"]
        )
    except (ValueError, TypeError, KeyError):
        return None
    return request if is_known else None


def _stages(request: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return sorted(request["stages"], key=lambda stage: float(stage["start_s"]))


def _headline(request: Mapping[str, Any]) -> str:
    parts = [f"{request.get('request_id', '')}", f"{request.get('model', '')}"]
    parts += [f"{request['state']}"] if request.get("state") else []
    for name, words in (("ttft_s", "first token after"), ("duration_s", "ended after")):
        if isinstance(request.get(name), int | float):
            parts.append(f"{words} {_milliseconds(request[name])} ms")
    parts += [f"{request[name]} {words}" for name, words in _SUMMARY.items() if request.get(name)]
    if request.get("workers"):
        parts.append("workers " + ", ".join(map(str, request["workers"])))
    if request.get("error"):
        parts.append(f"error: {request['error']}")
    return " · ".join(part for part in parts if part)


def _table(stages: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("stage", no_wrap=True)
    table.add_column("process", no_wrap=True)
    table.add_column("start ms", justify="right", no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, min_width=_BAR_CHARACTERS)
    table.add_column("details", overflow="fold")
    if not stages:
        return table
    begin_s = float(stages[0]["start_s"])
    span_s = max(float(stage["start_s"]) + float(stage["duration_s"]) for stage in stages) - begin_s
    for stage in stages:
        offset_s, duration_s = float(stage["start_s"]) - begin_s, float(stage["duration_s"])
        table.add_row(
            Text(stage["name"]),
            Text(str(stage.get("process", ""))),
            _milliseconds(offset_s),
            _milliseconds(duration_s),
            Text(_bar(offset_s, duration_s, span_s), style="cyan"),
            Text(_details(stage.get("attributes") or {}, duration_s)),
        )
    return table


def _bar(offset_s: float, duration_s: float, span_s: float) -> str:
    """A bar from `offset_s` for `duration_s`, on a line that stands for `span_s`; the shortest bar is a thin stroke."""
    scale = 0.0 if span_s <= 0 else 8 * _BAR_CHARACTERS / span_s
    start = min(round(offset_s * scale) // 8, _BAR_CHARACTERS - 1)
    eighths = max(1, min(round(duration_s * scale), 8 * (_BAR_CHARACTERS - start)))
    full, rest = divmod(eighths, 8)
    return " " * start + "█" * full + (_EIGHTHS[rest] if rest else "")


def _details(attributes: Mapping[str, Any], duration_s: float) -> str:
    """Attributes in readable units, with the rate of stages that move bytes; times of zero are left out."""
    figures = {name: value for name, value in attributes.items() if value or not name.endswith(("_ms", "_s"))}
    parts = [_figure(name, value) for name, value in figures.items()]
    num_bytes = attributes.get("num_bytes")
    if isinstance(num_bytes, int | float) and duration_s > 0 and "gb_per_s" not in attributes:
        parts.append(f"{num_bytes / duration_s / 1e9:.2f} GB/s")
    return ", ".join(parts)


def _figure(name: str, value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if name.endswith("_bytes"):
            return f"{name[:-6].removeprefix('num').replace('_', ' ')} {_size(float(value))}".strip()
        if name == "gb_per_s":
            return f"{value:.2f} GB/s"
        if name.startswith("num_"):
            return f"{value} {name[4:].replace('_', ' ')}"
        if name.endswith("_s"):
            return f"{name[:-2].replace('_', ' ')} {_milliseconds(value)} ms"
        if name.endswith("_ms"):
            return f"{name[:-3].replace('_', ' ')} {value:.1f} ms"
    return f"{name.replace('_', ' ')} {value}"


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f}"
