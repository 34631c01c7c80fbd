"""Parsers of tool calls and thinking, by model family."""
