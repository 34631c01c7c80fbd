"""Entry point of the planner: reads settings, then runs `tandem.planner_service`."""

import sys

from tandem.planner_service.settings import PlannerSettings
from tandem.process.command import run_command


def _serve(settings: PlannerSettings) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code."""
    from tandem.planner_service.process import run_planner

    return run_planner(settings)


if __name__ == "__main__":
    sys.exit(run_command(PlannerSettings, sys.argv[1:], _serve))
