"""Structured logs, metrics and traces for operators. Imports no torch and none of the rooms it reports about."""
