"""Ranks: the processes of one worker that each compute a part of its model.

Each pipeline *stage* has some of the layers, each *context* some of a prompt's tokens; the ranks of one stage and
context split every layer (tensor parallelism). Rank 0, the *leader*, is the worker's own process. It starts the other
ranks, here and on further hosts, sends them every step, watches and ends them.
"""
