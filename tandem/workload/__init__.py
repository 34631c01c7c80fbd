"""Workloads (lengths, arrivals, traces) and service level objectives, shared by benchmarks, simulator and planner."""
