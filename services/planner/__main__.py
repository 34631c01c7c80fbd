"""Entry point of the planner's process: settings, then `tandem.scaling`."""

import sys

from tandem.scaling.settings import PlannerSettings
from tandem.serving.command import run_command

if __name__ == "__main__":
    sys.exit(run_command(PlannerSettings, sys.argv[1:]))
