"""Memory at the peak of loading codes, beside the codes: each kind of published format, random weights.

Each is loaded by the compiled kernels in a process of its own, without a packed file, and all pages are read. Nothing
is timed, so other load does not matter.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.report import Report, Row
from tests.helpers.coded_sizes import KINDS, LARGE, SMALL, loading, save_codes

_MB = 1e6


def measure(names: Sequence[str], hidden_size: int = LARGE) -> Report:
    rows = []
    for name in names:
        with tempfile.TemporaryDirectory() as place:
            small = save_codes(Path(place) / "small", name, SMALL)
            weights, growth = loading(small, save_codes(Path(place) / "large", name, hidden_size), is_native=True)
        rows.append(Row("load", name, "codes in memory", weights / _MB, "MB"))
        rows.append(Row("load", name, "peak beside the codes", growth / weights, "x"))
        print(f"{name}: {weights / _MB:.0f} MB, peak {growth / weights:.3f} x", flush=True)
    return Report("loading", {"hidden_size": hidden_size}, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, help="these formats")
    parser.add_argument("--hidden-size", type=int, default=LARGE, help="2048: 240 million weights; 4096: 960 million")
    parser.add_argument("--save", action="store_true", help="keep the JSON under bench/results")
    arguments = parser.parse_args()
    report = measure(arguments.only, arguments.hidden_size)
    report.print()
    if arguments.save:
        print(f"saved {report.save().relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()
