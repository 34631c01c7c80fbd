"""Entry point of the planner: reads settings, then runs `tandem.planner_service`."""

import sys
from typing import TYPE_CHECKING

from tandem.process.early_exit import exit_while_importing

if TYPE_CHECKING:
    from tandem.planner_service.settings import PlannerSettings


def _main() -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code."""
    exit_while_importing()
    from tandem.planner_service.settings import PlannerSettings
    from tandem.process.command import run_command

    return run_command(PlannerSettings, sys.argv[1:], _serve)


def _serve(settings: "PlannerSettings") -> int:
    from tandem.planner_service.process import run_planner

    return run_planner(settings)


if __name__ == "__main__":
    sys.exit(_main())
