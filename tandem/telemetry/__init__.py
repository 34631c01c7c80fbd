"""Structured logs, metrics and traces for operators. Imports neither torch nor the packages it reports about."""
