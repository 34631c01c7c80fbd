"""Parsers and grammars of tool calls and thinking, by model family."""
