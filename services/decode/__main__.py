"""Entry point of a decode worker: reads settings, then runs `tandem.worker`."""

import sys

from tandem.process.command import run_command
from tandem.worker.command import serve_worker
from tandem.worker.settings import DecodeSettings

if __name__ == "__main__":
    sys.exit(run_command(DecodeSettings, sys.argv[1:], serve_worker))
