"""The three kinds of patch: merge, JSON and strategic merge (lists of named things are merged by name or type)."""

import copy
from typing import Any

_KEYS = ("name", "type", "containerPort")


def patched(found: Any, patch: Any, content_type: str) -> Any:
    """`found` after `patch`. Raises `ValueError` for a kind of patch or operation that is unknown."""
    kind = content_type.split(";")[0].strip()
    if kind == "application/merge-patch+json":
        return _merged(found, patch, is_strategic=False)
    if kind == "application/strategic-merge-patch+json":
        return _merged(found, patch, is_strategic=True)
    if kind == "application/json-patch+json":
        changed = copy.deepcopy(found)
        for operation in patch:
            _operate(changed, operation)
        return changed
    raise ValueError(f"the body of the request was in an unknown format: {kind}")


def _merged(found: Any, patch: Any, *, is_strategic: bool) -> Any:
    if is_strategic and isinstance(found, list) and isinstance(patch, list):
        return _merged_list(found, patch)
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    changed = dict(found) if isinstance(found, dict) else {}
    for name, value in patch.items():
        if value is None:
            changed.pop(name, None)
        else:
            changed[name] = _merged(changed.get(name), value, is_strategic=is_strategic)
    return changed


def _merged_list(found: list[Any], patch: list[Any]) -> list[Any]:
    key = next((key for key in _KEYS if all(isinstance(item, dict) and key in item for item in [*found, *patch])), None)
    if key is None:
        return copy.deepcopy(patch)
    by_key = {item[key]: item for item in found}
    for item in patch:
        by_key[item[key]] = _merged(by_key.get(item[key]), item, is_strategic=True)
    return list(by_key.values())


def _operate(changed: Any, operation: dict[str, Any]) -> None:
    *parents, last = [piece.replace("~1", "/").replace("~0", "~") for piece in operation["path"].split("/")[1:]]
    for piece in parents:
        changed = changed[int(piece)] if isinstance(changed, list) else changed[piece]
    at: Any = int(last) if isinstance(changed, list) and last != "-" else last
    if operation["op"] == "test":
        if changed[at] != operation["value"]:
            raise ValueError(f"testing path {operation['path']} failed")
    elif operation["op"] == "remove":
        del changed[at]
    elif operation["op"] == "add" and isinstance(changed, list):
        changed.insert(len(changed) if at == "-" else at, operation["value"])
    elif operation["op"] in ("add", "replace"):
        changed[at] = operation["value"]
    else:
        raise ValueError(f"unexpected kind: {operation['op']}")
