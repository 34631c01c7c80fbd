"""The production protocol on a virtual clock: several processes in one, a network in memory, faults by seed."""
