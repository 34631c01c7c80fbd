"""Journal of a run: one line a step and one for each pod that stops, on the terminal and in a file."""

import sys
import threading
import time
from pathlib import Path


class Journal:
    """Lines with the seconds since the start. Any thread may tell. Use as a context."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.lines: list[str] = []
        self._file = path.open("w")
        self._lock = threading.Lock()
        self._begun_s = time.monotonic()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def tell(self, line: str) -> None:
        """Add a line."""
        with self._lock:
            stamped = f"[{time.monotonic() - self._begun_s:6.1f} s] {line}\n"
            self.lines.append(line)
            for file in (sys.stdout, self._file):
                file.write(stamped)
                file.flush()
