"""A fleet in virtual time: the same routing and planning decisions, workers that only take as long as real ones."""
