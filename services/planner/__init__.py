"""The planner as a process: `python -m services.planner`."""
