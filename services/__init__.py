"""The processes: thin shells that read settings, wire the library together, serve and drain. None exists yet."""
