"""Deterministic simulation: runs production code in one process on a virtual clock, with faults, all from one seed.

Each simulated process is a *node*. Network, hardware and model are replaced; invariants are checked at the end of a
run.
"""
