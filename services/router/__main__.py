"""Entry point of the router: reads settings, then runs `tandem.router`."""

import sys

from tandem.process.command import run_command
from tandem.router.settings import RouterSettings


def _serve(settings: RouterSettings) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code."""
    from tandem.router.process import run_router

    return run_router(settings)


if __name__ == "__main__":
    sys.exit(run_command(RouterSettings, sys.argv[1:], _serve))
