"""Disk of a simulated process: a directory that outlives it, and the journal there, whose writes fail while it is full.

The journal is production's, over a real file. A write to a full disk is cut off in the middle of a line.
"""

import errno
import json
from collections.abc import Sequence
from pathlib import Path

from tandem.accounts.charge import ChargeSettlement
from tandem.accounts.journal import Journal


class SimulatedDisk:
    """Directory of one process, which may be full. `was_ever_full`: whether some write may have failed."""

    def __init__(self, directory: Path) -> None:
        self.journal_path = directory / "journal"
        self.was_ever_full = False
        self._is_full = False
        directory.mkdir()

    @property
    def is_full(self) -> bool:
        return self._is_full

    def fill(self) -> None:
        """Make all writes fail until `empty`."""
        self._is_full = self.was_ever_full = True

    def empty(self) -> None:
        self._is_full = False


class JournalOnDisk(Journal):
    """`Journal` on a simulated disk; writes fail half-way while it is full."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self._disk = disk
        super().__init__(disk.journal_path)

    def add(self, settlements: Sequence[ChargeSettlement]) -> None:
        if not self._disk.is_full:
            super().add(settlements)
            return
        with self._disk.journal_path.open("a") as file:
            line = json.dumps(settlements[0].as_json())
            file.write(line[: len(line) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")
