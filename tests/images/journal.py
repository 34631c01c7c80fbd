"""Journal of an end-to-end run: one line a step, on the terminal and in a file that can be kept."""

import os
import sys
import time
from pathlib import Path
from types import TracebackType

DEFAULT_PATH = Path(__file__).parents[2] / "build" / "e2e-images.log"


class Journal:
    """Lines with the seconds since the start. `TANDEM_E2E_LOG` names another file. Use as a context."""

    def __init__(self) -> None:
        path = Path(os.environ.get("TANDEM_E2E_LOG") or DEFAULT_PATH)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w")
        self._start_s = time.monotonic()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._file.close()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start_s

    def tell(self, line: str) -> None:
        """Add a line."""
        stamped = f"[{self.elapsed_s:6.1f} s] {line}\n"
        sys.stdout.write(stamped)
        sys.stdout.flush()
        self._file.write(stamped)
        self._file.flush()
