"""The gateway as a process: `python -m services.gateway`."""
