"""The planner's process: observes the pools, asks `tandem.planning`, acts on replicas or only advises."""
