"""Entry point of the planner's process: settings, then `tandem.scaling`."""

import sys

from tandem.scaling.settings import PlannerSettings
from tandem.serving.command import run_command


def _serve(settings: PlannerSettings) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code."""
    from tandem.scaling.process import run_planner

    return run_planner(settings)


if __name__ == "__main__":
    sys.exit(run_command(PlannerSettings, sys.argv[1:], _serve))
