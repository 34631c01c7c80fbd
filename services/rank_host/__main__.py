"""Entry point of a further host of a worker's ranks: reads settings, then runs `tandem.worker`."""

import sys

from tandem.process.early_exit import exit_while_importing


def _main() -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code."""
    exit_while_importing()
    from tandem.process.command import run_command
    from tandem.worker.command import serve_rank_host
    from tandem.worker.host_settings import RankHostSettings

    return run_command(RankHostSettings, sys.argv[1:], serve_rank_host)


if __name__ == "__main__":
    sys.exit(_main())
