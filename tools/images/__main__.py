"""`python -m tools.images`: builds every image of this checkout and prints their names and sizes."""

import sys
import time

from tools.images.build import build_images, sizes
from tools.images.command import CommandError


def main() -> int:
    """Returns the exit code."""
    start_s = time.monotonic()
    try:
        images = build_images()
        for name, size in sizes(images).items():
            print(f"{name:40} {size / 2**20:7.0f} MiB")
    except CommandError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"built in {time.monotonic() - start_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
