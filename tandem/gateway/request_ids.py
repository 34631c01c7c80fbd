"""Request ids: the client's if it is valid, else a new one. Invariant: no two live requests share one."""

from tandem.core.fresh_numbers import FreshNumbers

MAX_CHARACTERS = 128  # of a client's id


class RequestIds:
    """Ids of live requests. Owned by one event loop."""

    def __init__(self) -> None:
        self._live: dict[str, int] = {}  # and by how many they are used
        self._fresh = FreshNumbers()

    def claim(self, wanted: str | None) -> str:
        """Returns `wanted` if valid and free, with a suffix if it is in use, else a new id. `release` it afterwards."""
        if wanted is None or not is_sane(wanted):
            wanted = f"req-{self._fresh.hex(32)}"
        elif wanted in self._live:
            wanted = f"{wanted}~{self._fresh.hex(8)}"
        self._live[wanted] = 1
        return wanted

    def share(self, request_id: str) -> None:
        """Adds a user of a live id, who must release it too."""
        self._live[request_id] += 1

    def release(self, request_id: str) -> None:
        """Removes one user of a live id; the id is free again after its last user."""
        self._live[request_id] -= 1
        if not self._live[request_id]:
            del self._live[request_id]


def is_sane(wanted: str) -> bool:
    """Whether a client's id may appear in headers, logs and other processes: short, visible ASCII.

    NOTE: no `/`, which separates a request's id from the index of a choice.
    """
    return 0 < len(wanted) <= MAX_CHARACTERS and all("!" <= c <= "~" and c != "/" for c in wanted)
