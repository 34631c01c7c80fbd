"""Objects, their versions, and all that happened to them since the last compaction. The fake's etcd."""

import asyncio
import copy
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

Key = tuple[str, str, str]
"""Resource, namespace, name."""


class ApiError(Exception):
    """Error that is answered as a `Status` with this code."""

    def __init__(self, code: int, reason: str, message: str, causes: Sequence[str] = (), after_s: int | None = None):
        super().__init__(message)
        self.code, self.reason, self.causes, self.after_s = code, reason, tuple(causes), after_s


@dataclass(frozen=True, slots=True)
class Change:
    """One step of history. `before` and `after` are None when it did not exist."""

    version: int
    key: Key
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Store:
    """Versions begin at 1000, so that there are older ones to ask for."""

    def __init__(self) -> None:
        self.version = 1000
        self.oldest = 1000
        self.history: list[Change] = []
        self.changed = asyncio.Event()
        self._objects: dict[Key, dict[str, Any]] = {}

    def get(self, key: Key) -> dict[str, Any]:
        if key not in self._objects:
            raise ApiError(404, "NotFound", f'{key[0]} "{key[2]}" not found')
        return copy.deepcopy(self._objects[key])

    def list(self, resource: str, namespace: str) -> Sequence[dict[str, Any]]:
        keys = sorted(key for key in self._objects if key[:2] == (resource, namespace))
        return [copy.deepcopy(self._objects[key]) for key in keys]

    def create(self, key: Key, found: Mapping[str, Any]) -> dict[str, Any]:
        if key in self._objects:
            raise ApiError(409, "AlreadyExists", f'{key[0]} "{key[2]}" already exists')
        own = {"name": key[2], "namespace": key[1], "uid": str(uuid.uuid4()), "creationTimestamp": now()}
        given = dict(found.get("metadata") or {})
        if given.get("resourceVersion"):
            raise ApiError(400, "BadRequest", "resourceVersion should not be set on objects to be created")
        return self._put(key, {**found, "metadata": {**given, **own}})

    def replace(self, key: Key, found: Mapping[str, Any]) -> dict[str, Any]:
        """NOTE: a version in `found` must be the present one; without one it overwrites."""
        known = self.get(key)
        version = (found.get("metadata") or {}).get("resourceVersion")
        if version and version != known["metadata"]["resourceVersion"]:
            message = f'Operation cannot be fulfilled on {key[0]} "{key[2]}": the object has been modified'
            raise ApiError(409, "Conflict", message)
        kept = {name: known["metadata"][name] for name in ("name", "namespace", "uid", "creationTimestamp")}
        return self._put(key, {**found, "metadata": {**(found.get("metadata") or {}), **kept}})

    def delete(self, key: Key) -> dict[str, Any]:
        gone = self.get(key)
        del self._objects[key]
        self.version += 1
        gone["metadata"]["resourceVersion"] = str(self.version)
        self._note(Change(self.version, key, gone, None))
        return gone

    def compact(self) -> None:
        """Forget all that happened."""
        self.version += 1
        self.oldest = self.version
        self.history.clear()

    def since(self, version: int) -> Sequence[Change]:
        if version < self.oldest:
            raise ApiError(410, "Expired", f"too old resource version: {version} ({self.oldest})")
        return [change for change in self.history if change.version > version]

    def wake(self) -> None:
        """Let whoever waits for a change look."""
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def _put(self, key: Key, found: dict[str, Any]) -> dict[str, Any]:
        before = self._objects.get(key)
        unversioned = copy.deepcopy(found)
        if before is not None:
            unversioned["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"]
        if unversioned == before:
            return unversioned  # NOTE: what changes nothing makes no new version
        self.version += 1
        unversioned["metadata"]["resourceVersion"] = str(self.version)
        self._objects[key] = unversioned
        self._note(Change(self.version, key, before, unversioned))
        return copy.deepcopy(unversioned)

    def _note(self, change: Change) -> None:
        self.history.append(change)
        self.wake()
