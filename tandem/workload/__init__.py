"""Workloads and service level objectives, shared by benchmarks, the simulator and the planner."""
