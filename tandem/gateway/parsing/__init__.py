"""How model families write tool calls and thinking."""
