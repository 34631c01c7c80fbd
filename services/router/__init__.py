"""The router as a process of its own: `python -m services.router`."""
