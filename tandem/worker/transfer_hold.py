"""Protects blocks that transfers write to from reuse, until all these transfers are over."""

import threading

from tandem.engine.async_engine import AsyncEngine
from tandem.transport.transfer import Transfer


class TransferHold:
    """Releases a hold of the engine after `close`, once all added transfers are over. Any thread may call.

    Args:
        name: of the hold, under which the engine keeps the blocks from reuse until `engine.kv.drop(name)`.
    """

    def __init__(self, engine: AsyncEngine, name: str) -> None:
        self._engine = engine
        self.name = name
        self._lock = threading.Lock()
        self._num_open = 1

    def add(self, transfer: Transfer) -> None:
        """Adds a transfer that writes to these blocks. Only before `close`."""
        with self._lock:
            assert self._num_open, f"{self.name} was dropped before a transfer was added"
            self._num_open += 1
        transfer.add_over_callback(lambda _: self._leave())

    def close(self) -> None:
        """Announces that no transfer will be added any more. Call once."""
        self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._num_open -= 1
            is_over = self._num_open == 0
        if is_over:
            self._engine.post(lambda engine: engine.kv.drop(self.name))
