"""Describes the ranks (processes) of the workers that served a request, as lines of text for `tandem trace`.

The ranks are the present ones; a worker's group may have been formed anew since the request.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def ranks_of(worker_ids: Sequence[Any], body: bytes) -> list[str]:
    """Lines about those workers that consist of several ranks. `body`: of `/admin/workers`; empty = no lines."""
    try:
        found = {each["worker_id"]: each for each in json.loads(body)["workers"]}
        return [
            line
            for name in dict.fromkeys(worker_ids)
            if (found.get(name) or {}).get("ranks")
            for line in _lines(found[name])
        ]
    except (ValueError, TypeError, KeyError):
        return []


def _lines(worker: Mapping[str, Any]) -> list[str]:
    ranks = worker["ranks"]
    members = ranks["members"]
    hosts = {each["host"] for each in members}
    where = f" on {len(hosts)} hosts" if len(hosts) > 1 else ""
    head = f"{worker['worker_id']} is {len(members)} ranks{where} now, formed {_times(ranks['num_epochs'])}:"
    return [head, *(f"  rank {each['rank']}: {_told(each)}" for each in members)]


def _told(member: Mapping[str, Any]) -> str:
    holds = [
        "" if member["stage"] is None else f"layers of stage {member['stage']}",
        "" if member["context"] is None else f"part {member['context']} of prompts",
        f"heads {member['part'] + 1} of {member['num_parts']}" if member["num_parts"] > 1 else "",
    ]
    heard = "" if not member["rank"] or member["silent_s"] is None else f"heard {member['silent_s']:.1f} s ago"
    parts = [f"process {member['pid']}", member["host"] or "", *holds, heard or "leads" * (not member["rank"])]
    return ", ".join(part for part in parts if part)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
