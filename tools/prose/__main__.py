"""Command line of the language checks: prints findings, ends with 1 if one of them is new."""

import argparse
import sys
from pathlib import Path

from tools.prose import __doc__ as description
from tools.prose.check import check, shrink

ROOT = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.prose", description=description)
    parser.add_argument(
        "--shrink", action="store_true", help="remove findings that are gone from the list of known ones"
    )
    parser.add_argument("--known", action="store_true", help="print the known findings, too, not only their number")
    arguments = parser.parse_args()
    if arguments.shrink:
        print(f"{shrink(ROOT)} lines removed from the list of known findings")
    verdict = check(ROOT)
    for finding in verdict.known if arguments.known else []:
        print(f"warning: {finding}")
    for error in [*map(str, verdict.new), *verdict.list_errors]:
        print(f"error: {error}")
    errors = len(verdict.new) + len(verdict.list_errors)
    print(f"language: {errors} errors, {len(verdict.known)} known findings are warnings (--known prints them)")
    return 0 if verdict.passed else 1


if __name__ == "__main__":
    sys.exit(main())
