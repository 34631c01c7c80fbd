"""Journal: a file of settlements that the store has not accepted yet, so that they survive this process.

One JSON object a line. Invariant: a settlement stays in the file until the store has it; the store counts a repeated
one once (`store` says for how long).
"""

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from tandem.accounts.charge import ChargeSettlement
from tandem.core.errors import ConfigurationError

_logger = logging.getLogger(__name__)


class Journal:
    """The journal file. Raises ConfigurationError where `path` cannot be written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.open("a").close()
        except OSError as error:
            raise ConfigurationError(f"accounts_journal={str(path)!r} cannot be written: {error}") from error

    def read(self) -> list[ChargeSettlement]:
        """Reads the settlements that an earlier process left; incomplete lines are skipped."""
        found: list[ChargeSettlement] = []
        for line in self._path.read_text().splitlines():
            try:
                found.append(ChargeSettlement.from_json(json.loads(line)))
            except (ValueError, KeyError, TypeError):
                _logger.warning("a line of the journal %s is no settlement and is left out", self._path)
        return found

    def add(self, settlements: Sequence[ChargeSettlement]) -> None:
        """Appends settlements; they are on disk when this returns. Call from any thread, one at a time."""
        with self._path.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # the last write was cut off
                    file.write(b"\n")
            file.writelines(f"{json.dumps(settlement.as_json())}\n".encode() for settlement in settlements)
            file.flush()
            os.fsync(file.fileno())

    def clear(self) -> None:
        """Empties the file."""
        self._path.write_bytes(b"")
