"""Recorded requests: readers of two public trace formats, one line at a time.

A line that cannot be read exactly raises an error that names file, line and value; nothing is guessed or skipped.
Formats: Mooncake (FAST'25), JSON lines with block hashes; Azure LLM inference trace 2023, CSV.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tandem.core.errors import InvalidRequestError, shown

MOONCAKE_BLOCK_SIZE = 512  # tokens of a block that a hash id names
MOONCAKE_TICK_S = 3.0  # resolution of its arrival times
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request. `block_ids` name the prompt's blocks: equal ids, equal prefix. Empty where unknown."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...] = ()


def read_trace(path: Path) -> Iterator[TraceRequest]:
    """A trace in the format its name ends with: `.jsonl` (Mooncake) or `.csv` (Azure).

    Raises:
        InvalidRequestError: the file or a line of it cannot be read.
    """
    readers: dict[str, Callable[[Path], Iterator[TraceRequest]]] = {".jsonl": read_mooncake, ".csv": read_azure}
    reader = readers.get(path.suffix)
    if reader is None:
        raise InvalidRequestError(f"trace {shown(str(path))} has an unknown format; name it .jsonl or .csv")
    return reader(path)


def read_mooncake(path: Path) -> Iterator[TraceRequest]:
    """`{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}` a line; blocks of 512 tokens.

    Arrivals come in ticks of three seconds; `arrivals.spread_in_ticks` spreads them.

    Raises:
        InvalidRequestError: the file or a line of it cannot be read.
    """
    latest_s = 0.0
    for where, line in _lines(path):
        fields = _parse_json(line, where)
        num_prompt_tokens = _count(fields.get("input_length"), "input_length", where)
        request = TraceRequest(
            arrival_s=_number(fields.get("timestamp"), "timestamp", where) / 1000,
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=_count(fields.get("output_length"), "output_length", where),
            block_ids=_block_ids(fields.get("hash_ids"), num_prompt_tokens, where),
        )
        latest_s = _in_order(request.arrival_s, latest_s, "timestamp", where)
        yield request


def read_azure(path: Path) -> Iterator[TraceRequest]:
    """`TIMESTAMP,ContextTokens,GeneratedTokens`; the first request arrives at zero.

    Raises:
        InvalidRequestError: the file or a line of it cannot be read.
    """
    lines = _lines(path)
    where, header = next(lines, (f"{path}:1", ""))
    if header != AZURE_HEADER:
        raise InvalidRequestError(f"{where}: header {shown(header)} is not {AZURE_HEADER!r}")
    first: datetime | None = None
    latest_s = 0.0
    for where, line in lines:
        values = line.split(",")
        if len(values) != 3:
            raise InvalidRequestError(f"{where}: {shown(line)} has {len(values)} fields; 3 are needed")
        at = _timestamp(values[0], where)
        first = at if first is None else first
        if (at.tzinfo is None) != (first.tzinfo is None):
            raise InvalidRequestError(f"{where}: TIMESTAMP={shown(values[0])}; every line or none must name its zone")
        arrival_s = _in_order((at - first).total_seconds(), latest_s, "TIMESTAMP", where)
        latest_s = arrival_s
        yield TraceRequest(
            arrival_s,
            _count(_integer(values[1]), "ContextTokens", where),
            _count(_integer(values[2]), "GeneratedTokens", where),
        )


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """(file:line, text) of each line that is not empty."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}:{number}", line.strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"trace {shown(str(path))} cannot be read: {error}") from error


def _parse_json(line: str, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{where}: {shown(line)} is not JSON") from error
    if not isinstance(fields, dict):
        raise InvalidRequestError(f"{where}: {shown(line)} is not a JSON object")
    return fields


def _number(value: object, name: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise InvalidRequestError(f"{where}: {name}={shown(value)}; a finite number of zero or more is needed")
    return float(value)


def _count(value: object, name: str, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
        raise InvalidRequestError(f"{where}: {name}={shown(value)}; a whole number above zero is needed")
    return value


def _integer(text: str) -> object:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else text


def _block_ids(value: object, num_prompt_tokens: int, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(block_id) is int for block_id in value):
        raise InvalidRequestError(f"{where}: hash_ids={shown(value)}; a list of whole numbers is needed")
    num_blocks = -(-num_prompt_tokens // MOONCAKE_BLOCK_SIZE)
    if len(value) != num_blocks:
        raise InvalidRequestError(
            f"{where}: {len(value)} hash_ids for input_length={num_prompt_tokens}; {num_blocks} are needed"
        )
    return tuple(value)


def _timestamp(text: str, where: str) -> datetime:
    """NOTE: the trace has seven decimals; Python drops the last. A date alone would be read as its midnight."""
    try:
        return datetime.fromisoformat(text if ":" in text else "")
    except ValueError as error:
        raise InvalidRequestError(f"{where}: TIMESTAMP={shown(text)} is not a time") from error


def _in_order(arrival_s: float, latest_s: float, name: str, where: str) -> float:
    if arrival_s < latest_s:
        raise InvalidRequestError(
            f"{where}: {name} is {latest_s - arrival_s:g} s before the line above; sort the trace"
        )
    return arrival_s
