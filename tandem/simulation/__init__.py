"""Deterministic simulation of the production code on a virtual clock: processes, network and faults from a seed."""
