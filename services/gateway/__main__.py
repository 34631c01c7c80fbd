"""`python -m services.gateway`: reads settings and serves; everything else is in `tandem.gateway`."""

import sys

from tandem.gateway.settings import GatewaySettings
from tandem.serving.command import run_command

if __name__ == "__main__":
    sys.exit(run_command(GatewaySettings, sys.argv[1:]))
