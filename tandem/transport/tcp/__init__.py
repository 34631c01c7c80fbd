"""TCP transport between hosts: bytes go from pool to socket to pool, and closing the socket reliably aborts a read."""
