"""One worker process: an engine, the transports that move its blocks, and what it promises to other workers."""
