"""Entry point of the router: reads settings, then runs `tandem.router`."""

import sys
from typing import TYPE_CHECKING

from tandem.process.early_exit import exit_while_importing

if TYPE_CHECKING:
    from tandem.router.settings import RouterSettings


def _main() -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code."""
    exit_while_importing()
    from tandem.process.command import run_command
    from tandem.router.settings import RouterSettings

    return run_command(RouterSettings, sys.argv[1:], _serve)


def _serve(settings: "RouterSettings") -> int:
    from tandem.router.process import run_router

    return run_router(settings)


if __name__ == "__main__":
    sys.exit(_main())
