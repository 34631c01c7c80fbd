"""A further host of one worker's ranks, as a process: `python -m services.rank_host`."""
