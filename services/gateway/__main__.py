"""Entry point of the gateway: reads settings, then runs `tandem.gateway`."""

import sys
from typing import TYPE_CHECKING

from tandem.process.early_exit import exit_while_importing

if TYPE_CHECKING:
    from tandem.gateway.settings import GatewaySettings


def _main() -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code."""
    exit_while_importing()
    from tandem.gateway.settings import GatewaySettings
    from tandem.process.command import run_command

    return run_command(GatewaySettings, sys.argv[1:], _serve)


def _serve(settings: "GatewaySettings") -> int:
    from tandem.gateway.server import run_gateway

    return run_gateway(settings)


if __name__ == "__main__":
    sys.exit(_main())
