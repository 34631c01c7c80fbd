"""Ranks: the processes of one worker that each compute a part of its model (tensor, pipeline and context parallelism).

Rank 0, the *leader*, is the worker's own process. It starts the other ranks, here and on further hosts, sends them
every step, watches and ends them.
"""
