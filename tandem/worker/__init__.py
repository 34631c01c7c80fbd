"""A worker process: an engine, the transports that move its KV blocks, and the leases it gives to other workers."""
