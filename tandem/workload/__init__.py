"""Workloads and objectives: shared by benchmarks, the simulator and the planner."""
