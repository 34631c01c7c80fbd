"""The router as a process: `python -m services.router`."""
