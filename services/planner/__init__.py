"""The planner as a process of its own: `python -m services.planner`."""
