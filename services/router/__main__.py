"""Entry point of the router's process: settings, then `tandem.serving`."""

import sys

from tandem.serving.command import run_command
from tandem.serving.router_settings import RouterSettings

if __name__ == "__main__":
    sys.exit(run_command(RouterSettings, sys.argv[1:]))
