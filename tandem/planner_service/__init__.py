"""The planner's process: observes the pools, plans with `tandem.planning`, and sets replicas or only advises."""
