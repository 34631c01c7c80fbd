"""What users ask for, and whether they got it in time: shared by benchmarks, the simulator and the planner."""
