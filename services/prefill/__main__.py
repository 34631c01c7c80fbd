"""Entry point of a prefill worker: reads settings, then runs `tandem.worker`."""

import sys

from tandem.process.early_exit import exit_while_importing


def _main() -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code."""
    exit_while_importing()
    from tandem.process.command import run_command
    from tandem.worker.command import serve_worker
    from tandem.worker.settings import PrefillSettings

    return run_command(PrefillSettings, sys.argv[1:], serve_worker)


if __name__ == "__main__":
    sys.exit(_main())
