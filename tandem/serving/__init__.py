"""What a process needs around the engine: settings now; lifecycle, discovery and leases with the services."""
