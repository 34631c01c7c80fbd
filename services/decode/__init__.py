"""A decode worker as a process: `python -m services.decode`."""
