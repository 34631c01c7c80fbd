"""A prefill worker as a process: `python -m services.prefill`."""
