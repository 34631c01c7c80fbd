"""Entry point of the gateway: reads settings, then runs `tandem.gateway`."""

import sys

from tandem.gateway.settings import GatewaySettings
from tandem.process.command import run_command


def _serve(settings: GatewaySettings) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code."""
    from tandem.gateway.server import run_gateway

    return run_gateway(settings)


if __name__ == "__main__":
    sys.exit(run_command(GatewaySettings, sys.argv[1:], _serve))
