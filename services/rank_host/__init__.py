"""The rank_host service: a further host of one worker's ranks."""
