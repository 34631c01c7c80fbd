"""What operators see: structured logs, metrics and traces. Imports no torch and none of the rooms it reports about."""
